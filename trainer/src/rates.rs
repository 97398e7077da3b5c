//! How much the hardware does per second: what the planner reckons with, and the file of what was measured.
//!
//! Owns [`Rates`], the planner's numbers, and [`RateCache`], the file that `castor doctor --bench` fills and every
//! plan reads. How a rate is measured is [`crate::measure`]'s business. Nothing depends on the file: what it does not
//! know is assumed.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use castor_kernels::{DType, Device};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::report::write_whole;
use crate::settings::EmulatedLinks;

/// Version of the form of the file.
const VERSION: u32 = 2;

/// What the hardware does per second, for [`crate::estimate`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// Floating-point operations of matrix products.
    pub products: f64,
    /// Floating-point operations of causal attention, forward and backward together.
    pub attention: f64,
    /// Bytes of device memory, read and written.
    pub device_memory: f64,
    /// Bytes from host to device, while as many go the other way.
    pub host_to_device: f64,
    /// Bytes from device to host, while as many go the other way.
    pub device_to_host: f64,
    /// Updates by the host's cores while copies go both ways; none where these cores are the device.
    pub host_updates: Option<HostUpdates>,
    /// Bytes from host to device, while as many go the other way and the host's cores update.
    pub host_to_device_beside_updates: f64,
    /// Bytes from device to host, the same.
    pub device_to_host_beside_updates: f64,
    /// Bytes received in all-gathers or sent in reductions; not measured, for it takes several ranks.
    pub collectives: f64,
    /// Bytes from disk to host.
    pub nvme_read: f64,
    /// Bytes from host to disk.
    pub nvme_write: f64,
    /// When all but the disk's were measured, seconds since 1970; none: they are assumed.
    pub measured_at: Option<u64>,
    /// When the disk's were measured, seconds since 1970; none: they are assumed.
    pub disk_measured_at: Option<u64>,
}

/// Bytes of host memory that its cores' updates read and write per second, by the type of the moments: narrow ones take
/// more instructions a byte.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostUpdates {
    /// Moments in f32.
    pub f32: f64,
    /// In bf16.
    pub bf16: f64,
    /// In 8 bits.
    pub q8: f64,
}

impl HostUpdates {
    /// With moments of this type.
    pub const fn of(&self, moments: DType) -> f64 {
        match moments {
            DType::Bf16 => self.bf16,
            DType::Q8 => self.q8,
            _ => self.f32,
        }
    }

    /// Each of them changed alike.
    #[must_use]
    pub fn map(self, change: impl Fn(f64) -> f64) -> HostUpdates {
        HostUpdates { f32: change(self.f32), bf16: change(self.bf16), q8: change(self.q8) }
    }
}

impl Rates {
    /// Rates to reckon with on a backend of this name until they are measured: those of an H200 with both directions
    /// of its link busy (`benches/LOG.md`), or of one CPU core.
    pub const fn assumed(backend: &str) -> Rates {
        let (measured_at, disk_measured_at) = (None, None);
        match backend.as_bytes() {
            b"cuda" => Rates {
                products: 680e12,
                attention: 430e12,
                device_memory: 3.5e12,
                host_to_device: 48.5e9,
                device_to_host: 48.5e9,
                host_updates: Some(HostUpdates { f32: 98e9, bf16: 68e9, q8: 53e9 }),
                host_to_device_beside_updates: 31e9,
                device_to_host_beside_updates: 48.5e9,
                collectives: 240e9,
                nvme_read: 1.5e9,
                nvme_write: 2.6e9,
                measured_at,
                disk_measured_at,
            },
            _ => Rates {
                products: 20e9,
                attention: 10e9,
                device_memory: 10e9,
                host_to_device: 5e9,
                device_to_host: 5e9,
                host_updates: None,
                host_to_device_beside_updates: 5e9,
                device_to_host_beside_updates: 5e9,
                collectives: 1e9,
                nvme_read: 0.5e9,
                nvme_write: 0.5e9,
                measured_at,
                disk_measured_at,
            },
        }
    }

    /// The best that is known of `device` and of the disk under `nvme`: what `cache` holds, else what is assumed.
    pub fn known(device: &Device, nvme: Option<&Path>, cache: &RateCache) -> Rates {
        let mut rates = Rates::assumed(device.backend);
        if let Some(measured) = cache.places.get(&device.name) {
            rates.measured_at = Some(measured.measured_at);
            rates.take(measured);
        }
        if let Some(measured) = nvme.and_then(|folder| cache.disk(folder)) {
            rates.disk_measured_at = Some(measured.measured_at);
            rates.take(measured);
        }
        rates
    }

    /// The rates of another machine, which `castor doctor --bench` measured there and kept in the file at `path`: those
    /// of the device and of the disk that were measured last, and the device's name.
    ///
    /// # Errors
    /// [`Error::Usage`] if the file cannot be read or knows no device.
    pub fn elsewhere(path: &Path) -> Result<(String, Rates)> {
        let refused = |reason: String| {
            let advice = "give the file that `castor doctor --bench` wrote on the machine to plan for";
            Error::Usage(format!("--rates {}: {reason}; {advice}", path.display()))
        };
        let bytes = std::fs::read(path).map_err(|error| refused(error.to_string()))?;
        let cache: RateCache = serde_json::from_slice(&bytes).map_err(|error| refused(error.to_string()))?;
        if !cache.is_sound() {
            return Err(refused(format!("it is of version {} or holds rates that are none", cache.version)));
        }
        let last = |disk: bool| {
            let places = cache.places.iter().filter(|(place, _)| place.starts_with(RateCache::DISK) == disk);
            places.max_by_key(|(_, measured)| measured.measured_at)
        };
        let (name, device) = last(false).ok_or_else(|| refused("no device was measured in it".into()))?;
        let mut rates = Rates { measured_at: Some(device.measured_at), ..Rates::assumed("cuda") };
        rates.take(device);
        if let Some((_, disk)) = last(true) {
            rates.disk_measured_at = Some(disk.measured_at);
            rates.take(disk);
        }
        Ok((name.clone(), rates))
    }

    fn take(&mut self, measured: &Measured) {
        for (rate, MeasuredRate { value, .. }) in &measured.rates {
            match rate {
                Rate::Products => self.products = *value,
                Rate::Attention => self.attention = *value,
                Rate::DeviceMemory => self.device_memory = *value,
                Rate::HostToDevice => self.host_to_device = *value,
                Rate::DeviceToHost => self.device_to_host = *value,
                Rate::NvmeRead => self.nvme_read = *value,
                Rate::NvmeWrite => self.nvme_write = *value,
                Rate::HostUpdates | Rate::HostUpdatesBf16 | Rate::HostUpdates8bit => {
                    if let Some(updates) = &mut self.host_updates {
                        match rate {
                            Rate::HostUpdatesBf16 => updates.bf16 = *value,
                            Rate::HostUpdates8bit => updates.q8 = *value,
                            _ => updates.f32 = *value,
                        }
                    }
                }
                Rate::HostToDeviceBesideUpdates => self.host_to_device_beside_updates = *value,
                Rate::DeviceToHostBesideUpdates => self.device_to_host_beside_updates = *value,
                Rate::HostToDeviceAlone | Rate::DeviceToHostAlone => {}
            }
        }
    }

    /// These rates with links no faster than the emulated ones.
    pub fn within(self, emulated: &EmulatedLinks) -> Rates {
        let cap = |rate: f64, gb_per_s: Option<f64>| gb_per_s.map_or(rate, |cap| rate.min(cap * 1e9));
        Rates {
            host_to_device: cap(self.host_to_device, emulated.h2d),
            device_to_host: cap(self.device_to_host, emulated.d2h),
            host_to_device_beside_updates: cap(self.host_to_device_beside_updates, emulated.h2d),
            device_to_host_beside_updates: cap(self.device_to_host_beside_updates, emulated.d2h),
            nvme_read: cap(self.nvme_read, emulated.nvme_read),
            nvme_write: cap(self.nvme_write, emulated.nvme_write),
            ..self
        }
    }

    /// These rates for each of `local` ranks that share the host's cores.
    pub fn shared_by(self, local: u32) -> Rates {
        Rates { host_updates: self.host_updates.map(|updates| updates.map(|rate| rate / f64::from(local))), ..self }
    }

    /// Where they come from, for people. `disk`: whether the disk's are used.
    pub fn origin(&self, disk: bool) -> String {
        const BENCH: &str = "`castor doctor --bench`";
        let all = match self.measured_at {
            Some(seconds) => format!("measured on {} by {BENCH}", date(seconds)),
            None => format!("assumed; {BENCH} measures them"),
        };
        match (disk, self.measured_at, self.disk_measured_at) {
            (true, None, Some(seconds)) => format!("{all}; the disk's measured on {}", date(seconds)),
            (true, Some(_), None) => format!("{all}; the disk's assumed: add --nvme to measure them"),
            _ => all,
        }
    }
}

/// What is measured.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rate {
    /// Matrix products, FLOP/s.
    Products,
    /// Causal attention, forward and backward, FLOP/s.
    Attention,
    /// Device memory read and written, B/s.
    DeviceMemory,
    /// Host to device while nothing goes the other way, B/s.
    HostToDeviceAlone,
    /// Device to host while nothing goes the other way, B/s.
    DeviceToHostAlone,
    /// Host to device while as much goes the other way, B/s.
    HostToDevice,
    /// Device to host while as much goes the other way, B/s.
    DeviceToHost,
    /// Host memory read and written by its cores' updates of f32 moments, beside copies both ways, B/s.
    HostUpdates,
    /// The same with moments in bf16.
    HostUpdatesBf16,
    /// The same with moments in 8 bits.
    #[serde(rename = "host_updates_8bit")]
    HostUpdates8bit,
    /// Host to device beside these, B/s.
    HostToDeviceBesideUpdates,
    /// Device to host beside these, B/s.
    DeviceToHostBesideUpdates,
    /// Disk to host, B/s.
    NvmeRead,
    /// Host to disk, B/s.
    NvmeWrite,
}

impl Rate {
    /// Name for people.
    pub const fn name(self) -> &'static str {
        match self {
            Rate::Products => "matrix products",
            Rate::Attention => "attention",
            Rate::DeviceMemory => "device memory",
            Rate::HostToDeviceAlone => "host to device, alone",
            Rate::DeviceToHostAlone => "device to host, alone",
            Rate::HostToDevice => "host to device, both ways",
            Rate::DeviceToHost => "device to host, both ways",
            Rate::HostUpdates => "updates on the host, f32 moments",
            Rate::HostUpdatesBf16 => "updates on the host, bf16 moments",
            Rate::HostUpdates8bit => "updates on the host, 8-bit moments",
            Rate::HostToDeviceBesideUpdates => "host to device, beside updates",
            Rate::DeviceToHostBesideUpdates => "device to host, beside updates",
            Rate::NvmeRead => "disk to host",
            Rate::NvmeWrite => "host to disk",
        }
    }

    /// Unit of its values.
    pub const fn unit(self) -> &'static str {
        match self {
            Rate::Products | Rate::Attention => "FLOP/s",
            _ => "B/s",
        }
    }

    /// What the planner does with it.
    pub const fn purpose(self) -> &'static str {
        match self {
            Rate::Products => "time of forward and backward",
            Rate::Attention => "the same, in long rows",
            Rate::DeviceMemory => "time of norms, SwiGLU and the update on the device",
            Rate::HostToDeviceAlone | Rate::DeviceToHostAlone => "to compare: a step uses both ways at once",
            Rate::HostToDevice => "time to fetch what lies off the device",
            Rate::DeviceToHost => "time to bring it back",
            Rate::HostUpdates | Rate::HostUpdatesBf16 | Rate::HostUpdates8bit => "time of updates by the host's cores",
            Rate::HostToDeviceBesideUpdates | Rate::DeviceToHostBesideUpdates => "time of copies meanwhile",
            Rate::NvmeRead => "time to fetch what lies on the disk",
            Rate::NvmeWrite => "time to bring it back to the disk",
        }
    }
}

/// A measured rate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeasuredRate {
    /// How much a second, in [`Rate::unit`].
    pub value: f64,
    /// With what it was measured: size, types, shape.
    pub how: String,
}

/// What was measured of one device or one disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Seconds since 1970.
    pub measured_at: u64,
    /// The rates.
    pub rates: BTreeMap<Rate, MeasuredRate>,
}

impl Measured {
    /// Rates measured now.
    pub fn now(rates: BTreeMap<Rate, MeasuredRate>) -> Measured {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Measured { measured_at: since.as_secs(), rates }
    }

    /// As a table headed by the name of what was measured, a line per rate.
    pub fn render(&self, place: &str) -> String {
        let rows: Vec<[String; 4]> = self
            .rates
            .iter()
            .map(|(rate, measured)| {
                let value = with_prefix(measured.value, rate.unit());
                [rate.name().into(), value, measured.how.clone(), rate.purpose().into()]
            })
            .collect();
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let (names, values, hows) = (width(0), width(1), width(2));
        let mut text = format!("Rates of {place}\n");
        for [name, value, how, purpose] in &rows {
            text.push_str(&format!("  {name:<names$}  {value:>values$}  {how:<hows$}  {purpose}\n"));
        }
        text
    }

    fn is_sound(&self) -> bool {
        self.rates.values().all(|rate| rate.value.is_finite() && rate.value > 0.0)
    }
}

/// All that was measured, by the name of the device ([`Device::name`]) or the place of the disk
/// ([`RateCache::disk_place`]). The rates of a device's links hold for the machine that it was measured in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RateCache {
    version: u32,
    places: BTreeMap<String, Measured>,
}

impl Default for RateCache {
    fn default() -> Self {
        RateCache { version: VERSION, places: BTreeMap::new() }
    }
}

impl RateCache {
    /// How the name of a disk's place begins.
    const DISK: &str = "disk at ";

    /// Where it is kept: `$XDG_CACHE_HOME/castor/rates.json`, else under `~/.cache`. None without a home.
    pub fn path() -> Option<PathBuf> {
        let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let cache = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
        Some(cache.join("castor").join("rates.json"))
    }

    /// Reads it. Empty if there is none, or it is of another version or broken: then rates are measured again.
    pub fn read(path: &Path) -> RateCache {
        let cache = || -> Option<RateCache> { serde_json::from_slice(&std::fs::read(path).ok()?).ok() };
        cache().filter(RateCache::is_sound).unwrap_or_default()
    }

    fn is_sound(&self) -> bool {
        self.version == VERSION && self.places.values().all(Measured::is_sound)
    }

    /// Writes it, with its folder.
    ///
    /// # Errors
    /// [`Error::Failed`] with path and reason.
    pub fn write(&self, path: &Path) -> Result<()> {
        let failed = |reason: String| Error::Failed(format!("{}: {reason}", path.display()));
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(|error| failed(error.to_string()))?;
        }
        let bytes = serde_json::to_vec_pretty(self).map_err(|error| failed(error.to_string()))?;
        write_whole(path, &bytes)
    }

    /// Keeps what was measured of `place`, in place of what was known of it.
    pub fn keep(&mut self, place: String, measured: Measured) {
        self.places.insert(place, measured);
    }

    /// The name under which the rates of the disk at `folder` are kept.
    pub fn disk_place(folder: &Path) -> String {
        format!("{}{}", RateCache::DISK, folder.canonicalize().unwrap_or_else(|_| folder.to_owned()).display())
    }

    /// The rates of the disk at `folder`, measured there or in a folder above it on the same disk.
    fn disk(&self, folder: &Path) -> Option<&Measured> {
        let folder = folder.canonicalize().ok()?;
        let disk = |folder: &Path| std::fs::metadata(folder).ok().map(|metadata| metadata.dev());
        let same = |above: &&Path| disk(above) == disk(&folder);
        folder.ancestors().take_while(same).find_map(|above| self.places.get(&RateCache::disk_place(above)))
    }
}

/// A value with a decimal prefix: `48.5 GB/s`.
fn with_prefix(value: f64, unit: &str) -> String {
    const PREFIXES: [(f64, &str); 5] = [(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    let (scale, prefix) = PREFIXES.into_iter().find(|(scale, _)| value >= *scale).unwrap_or((1.0, ""));
    format!("{:.1} {prefix}{unit}", value / scale)
}

/// The day, in UTC, of a number of seconds since 1970: `2026-11-30`.
fn date(seconds: u64) -> String {
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    // From the beginning of the 400 years, after which the calendar repeats, in which the day lies.
    const CYCLE_DAYS: u64 = 146_097;
    let days = seconds / 86_400;
    let (mut year, mut day) = (1970 + 400 * (days / CYCLE_DAYS), days % CYCLE_DAYS);
    while day >= 365 + u64::from(leap(year)) {
        day -= 365 + u64::from(leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while day >= lengths[month] {
        day -= lengths[month];
        month += 1;
    }
    format!("{year}-{:02}-{:02}", month + 1, day + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(rate: Rate, value: f64) -> Measured {
        Measured::now(BTreeMap::from([(rate, MeasuredRate { value, how: "64 MiB".into() })]))
    }

    fn device() -> Device {
        let name = "A GPU".into();
        Device { backend: "cuda", name, available_bytes: 0, overhead_bytes: 0, fused_attention: true }
    }

    #[test]
    fn what_is_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("castor/rates.json");
        assert_eq!(RateCache::read(&path), RateCache::default());
        let mut cache = RateCache::default();
        cache.keep("A GPU".into(), measured(Rate::HostToDevice, 1.25e10));
        cache.write(&path).unwrap();
        let mut again = RateCache::read(&path);
        assert_eq!(again, cache);
        again.keep("another".into(), measured(Rate::Products, 2e13));
        again.write(&path).unwrap();
        let rates = Rates::known(&device(), None, &RateCache::read(&path));
        let assumed = Rates::assumed("cuda");
        assert_eq!(rates, Rates { host_to_device: 1.25e10, measured_at: rates.measured_at, ..assumed });
        assert!(rates.measured_at.is_some());
    }

    #[test]
    fn a_broken_or_foreign_file_is_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rates.json");
        let mut cache = RateCache::default();
        cache.keep("A GPU".into(), measured(Rate::Products, 0.0));
        cache.write(&path).unwrap();
        assert_eq!(RateCache::read(&path), RateCache::default(), "nothing takes for ever");
        RateCache { version: VERSION + 1, ..RateCache::default() }.write(&path).unwrap();
        assert_eq!(RateCache::read(&path), RateCache::default());
        std::fs::write(&path, "{").unwrap();
        assert_eq!(RateCache::read(&path), RateCache::default());
    }

    #[test]
    fn a_disk_is_known_in_the_folders_below() {
        let folder = tempfile::tempdir().unwrap();
        let below = folder.path().join("run/chunks");
        std::fs::create_dir_all(&below).unwrap();
        let mut cache = RateCache::default();
        cache.keep(RateCache::disk_place(folder.path()), measured(Rate::NvmeRead, 7e9));
        assert_eq!(Rates::known(&device(), Some(&below), &cache).nvme_read, 7e9);
        let without = Rates::known(&device(), None, &cache);
        assert_eq!(without, Rates::assumed("cuda"));
    }

    #[test]
    fn another_machine_is_planned_for_by_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rates.json");
        let refusal = || Rates::elsewhere(&path).unwrap_err().to_string();
        assert!(refusal().contains("rates.json") && refusal().contains("doctor --bench"), "{}", refusal());
        let mut cache = RateCache::default();
        cache.keep(RateCache::disk_place(Path::new("/data")), measured(Rate::NvmeRead, 7e9));
        cache.write(&path).unwrap();
        assert!(refusal().contains("no device"), "{}", refusal());
        let at = |measured_at, value| Measured { measured_at, ..measured(Rate::Products, value) };
        cache.keep("A newer GPU".into(), at(20, 2e14));
        cache.keep("An older GPU".into(), at(10, 1e14));
        cache.write(&path).unwrap();
        let (name, rates) = Rates::elsewhere(&path).unwrap();
        assert_eq!((name.as_str(), rates.products, rates.nvme_read), ("A newer GPU", 2e14, 7e9));
        assert_eq!((rates.measured_at, rates.collectives), (Some(20), Rates::assumed("cuda").collectives));
        cache.keep("A newest GPU".into(), at(30, 0.0));
        cache.write(&path).unwrap();
        assert!(refusal().contains("version 2"), "{}", refusal());
    }

    #[test]
    fn an_emulated_link_is_no_faster_than_asked() {
        let emulated = EmulatedLinks { h2d: Some(0.25), d2h: Some(1e6), ..EmulatedLinks::default() };
        let rates = Rates::assumed("cpu").within(&emulated);
        let slow = Rates { host_to_device: 0.25e9, host_to_device_beside_updates: 0.25e9, ..Rates::assumed("cpu") };
        assert_eq!(rates, slow);
    }

    #[test]
    fn words() {
        assert_eq!(with_prefix(48.51e9, "B/s"), "48.5 GB/s");
        assert_eq!(with_prefix(713e12, "FLOP/s"), "713.0 TFLOP/s");
        assert_eq!(with_prefix(12.0, "B/s"), "12.0 B/s");
        for (seconds, day) in [
            (0, "1970-01-01"),
            (951_782_400, "2000-02-29"),
            (951_868_800, "2000-03-01"),
            (1_796_083_199, "2026-11-30"),
            (13_574_563_200, "2400-02-29"),
            (13_601_088_000, "2401-01-01"),
        ] {
            assert_eq!(date(seconds), day);
        }
        let table = measured(Rate::Products, 2e13).render("A GPU");
        assert!(table.contains("A GPU") && table.contains("20.0 TFLOP/s") && table.contains("64 MiB"), "{table}");
        let rates = Rates { measured_at: Some(0), ..Rates::assumed("cpu") };
        assert!(rates.origin(false).starts_with("measured on 1970-01-01 by `castor doctor --bench`"));
        assert!(rates.origin(true).contains("the disk's assumed"));
        assert!(Rates::assumed("cpu").origin(true).starts_with("assumed"));
    }
}
