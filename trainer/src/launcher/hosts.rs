//! Which hosts run how many ranks: `--host`, `--hostfile`, `--include`, `--exclude`.

use std::collections::BTreeSet;
use std::path::Path;

use crate::error::{Error, Result};

/// A host and what of it is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Name or address as the user wrote it; what ssh gets.
    pub name: String,
    /// Ranks it can take, if the host file says so.
    pub slots: Option<u32>,
    /// Devices chosen by `--include` or left by `--exclude`; empty: all.
    pub devices: Vec<u32>,
}

/// Reads `--host a,b`.
///
/// # Errors
/// [`Error::Usage`] for an empty or repeated name.
pub fn from_list(list: &str) -> Result<Vec<Host>> {
    let mut hosts = Vec::new();
    for name in list.split(',').map(str::trim) {
        add(&mut hosts, name, None).map_err(|reason| Error::Usage(format!("--host {list}: {reason}")))?;
    }
    Ok(hosts)
}

/// Reads a host file: `NAME [slots=N]` a line, blank lines and `#` comments skipped.
///
/// # Errors
/// [`Error::Usage`] with file, line number and the line itself.
pub fn from_file(path: &Path) -> Result<Vec<Host>> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| Error::Usage(format!("--hostfile {}: {error}", path.display())))?;
    let mut hosts = Vec::new();
    for (index, line) in text.trim_start_matches('\u{feff}').lines().enumerate() {
        let content = line.split('#').next().unwrap_or_default().trim();
        if content.is_empty() {
            continue;
        }
        file_line(&mut hosts, content).map_err(|reason| {
            Error::Usage(format!(
                "{}, line {}: {reason} in {:?}; expected NAME or NAME slots=N",
                path.display(),
                index + 1,
                line.trim_end()
            ))
        })?;
    }
    if hosts.is_empty() {
        return Err(Error::Usage(format!("{}: names no host", path.display())));
    }
    Ok(hosts)
}

fn file_line(hosts: &mut Vec<Host>, content: &str) -> std::result::Result<(), String> {
    let mut words = content.split_whitespace();
    let name = words.next().unwrap_or_default();
    let mut slots = None;
    for word in words {
        let number = word.strip_prefix("slots=").ok_or_else(|| format!("unknown word {word:?}"))?;
        if slots.is_some() {
            return Err("slots given twice".into());
        }
        slots = match number.parse::<u32>() {
            Ok(0) | Err(_) => return Err(format!("slots={number} is not a number from 1 up")),
            Ok(count) => Some(count),
        };
    }
    add(hosts, name, slots)
}

fn add(hosts: &mut Vec<Host>, name: &str, slots: Option<u32>) -> std::result::Result<(), String> {
    // A name that begins with a dash would be an option to ssh.
    let allowed = |c: char| c.is_alphanumeric() || "-_.:@%[]".contains(c);
    if name.is_empty() || name.starts_with('-') || !name.chars().all(allowed) {
        return Err(format!("{name:?} is not a host name"));
    }
    if hosts.iter().any(|host| host.name == name) {
        return Err(format!("host {name} is named twice"));
    }
    hosts.push(Host { name: name.to_owned(), slots, devices: Vec::new() });
    Ok(())
}

/// Keeps what `--include` names. Hosts keep the order of `hosts`.
///
/// # Errors
/// [`Error::Usage`] naming an unknown host or a device beyond its slots.
pub fn include(hosts: Vec<Host>, filter: &str) -> Result<Vec<Host>> {
    let wanted = parse_filter("--include", filter, &hosts)?;
    let kept: Vec<Host> = hosts
        .into_iter()
        .filter_map(|mut host| {
            let (_, devices) = wanted.iter().find(|(name, _)| *name == host.name)?;
            host.devices = devices.iter().copied().collect();
            Some(host)
        })
        .collect();
    Ok(kept)
}

/// Drops what `--exclude` names; devices can be excluded only from a host whose slots are known.
///
/// # Errors
/// As [`include`], and if nothing is left.
pub fn exclude(hosts: Vec<Host>, filter: &str) -> Result<Vec<Host>> {
    let unwanted = parse_filter("--exclude", filter, &hosts)?;
    let mut kept = Vec::new();
    for mut host in hosts {
        match unwanted.iter().find(|(name, _)| *name == host.name) {
            None => kept.push(host),
            Some((_, devices)) if devices.is_empty() => {}
            Some((_, devices)) => {
                let slots = host.slots.ok_or_else(|| {
                    Error::Usage(format!(
                        "--exclude {filter}: how many devices {0} has is not known; say {0} slots=N in a host file",
                        host.name
                    ))
                })?;
                host.devices = (0..slots).filter(|slot| !devices.contains(slot)).collect();
                if !host.devices.is_empty() {
                    kept.push(host);
                }
            }
        }
    }
    if kept.is_empty() {
        return Err(Error::Usage(format!("--exclude {filter}: no host is left")));
    }
    Ok(kept)
}

/// `A:0,2@B` (DeepSpeed) or `A,B` (ColossalAI: no device numbers): each host with its devices, none meaning all.
fn parse_filter(flag: &str, filter: &str, hosts: &[Host]) -> Result<Vec<(String, BTreeSet<u32>)>> {
    let refuse = |reason: String| Err(Error::Usage(format!("{flag} {filter}: {reason}")));
    let parts: Vec<&str> =
        if filter.contains([':', '@']) { filter.split('@').collect() } else { filter.split(',').collect() };
    let mut found: Vec<(String, BTreeSet<u32>)> = Vec::new();
    for part in parts {
        // The longest known name first, so that an IPv6 address is not cut at its colons.
        let known = hosts
            .iter()
            .map(|host| host.name.as_str())
            .filter(|name| part.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with(':')))
            .max_by_key(|name| name.len());
        let Some(name) = known else {
            let names: Vec<&str> = hosts.iter().map(|host| host.name.as_str()).collect();
            let unknown = part.split(':').next().unwrap_or_default();
            return refuse(format!("{unknown:?} is not among the hosts ({})", names.join(", ")));
        };
        if found.iter().any(|(other, _)| other == name) {
            return refuse(format!("host {name} is named twice"));
        }
        let slots = hosts.iter().find(|host| host.name == name).and_then(|host| host.slots);
        let mut devices = BTreeSet::new();
        if let Some(list) = part[name.len()..].strip_prefix(':') {
            for text in list.split(',') {
                let Ok(device) = text.trim().parse::<u32>() else {
                    return refuse(format!(
                        "{text:?} is not a device number; devices are separated by commas, hosts by @"
                    ));
                };
                if slots.is_some_and(|slots| device >= slots) {
                    return refuse(format!("{name} has slots 0 to {}, not {device}", slots.unwrap_or(1) - 1));
                }
                if !devices.insert(device) {
                    return refuse(format!("device {device} of {name} is named twice"));
                }
            }
        }
        found.push((name.to_owned(), devices));
    }
    Ok(found)
}

/// Whether a name means this machine, so that no ssh is needed.
pub fn is_this_machine(name: &str, own_name: &str) -> bool {
    let bare = name.trim_start_matches('[').trim_end_matches(']');
    let short = |name: &str| name.split('.').next().unwrap_or_default().to_owned();
    let loopback = bare.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback());
    loopback
        || bare == "localhost"
        || bare.starts_with("localhost.")
        || (!own_name.is_empty() && (bare == own_name || (!bare.contains('.') && bare == short(own_name))))
}

/// This machine's name, empty if the system does not tell.
pub fn own_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").map(|name| name.trim().to_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> Result<Vec<Host>> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hosts");
        std::fs::write(&path, text).unwrap();
        from_file(&path)
    }

    fn names(hosts: &[Host]) -> String {
        let each: Vec<String> = hosts.iter().map(|host| format!("{}{:?}", host.name, host.devices)).collect();
        each.join(" ")
    }

    #[test]
    fn host_file_forms() {
        let hosts = file("\u{feff}# all\r\n a slots=2 \r\n\r\nb\tslots=4 # big\nc\n10.0.0.7\n").unwrap();
        let found: Vec<_> = hosts.iter().map(|host| (host.name.as_str(), host.slots)).collect();
        assert_eq!(found, [("a", Some(2)), ("b", Some(4)), ("c", None), ("10.0.0.7", None)]);
    }

    #[test]
    fn host_file_errors_have_file_line_and_text() {
        for (line, reason) in [
            ("h lots=8", "unknown word \"lots=8\""),
            ("h slots=", "slots="),
            ("h slots=-1", "slots=-1"),
            ("h slots=0", "slots=0"),
            ("h slots=2 slots=3", "twice"),
            ("first", "host first is named twice"),
            ("-oProxyCommand=x", "not a host name"),
        ] {
            let message = file(&format!("first\n{line}\n")).unwrap_err().to_string();
            for part in ["hosts, line 2", reason, line] {
                assert!(message.contains(part), "{message}");
            }
        }
        assert!(file("# nobody\n").unwrap_err().to_string().contains("names no host"));
        let missing = from_file(Path::new("/no/such/file")).unwrap_err().to_string();
        assert!(missing.contains("/no/such/file"), "{missing}");
    }

    #[test]
    fn filters() {
        let hosts = file("a slots=4\nb slots=4\nc\n").unwrap();
        let included = |filter: &str| include(hosts.clone(), filter).map(|kept| names(&kept));
        let excluded = |filter: &str| exclude(hosts.clone(), filter).map(|kept| names(&kept));
        assert_eq!(included("b:2,0@c").unwrap(), "b[0, 2] c[]");
        assert_eq!(included("c,a").unwrap(), "a[] c[]");
        assert_eq!(excluded("b:1@a").unwrap(), "b[0, 2, 3] c[]");
        assert_eq!(excluded("a:0,1,2,3").unwrap(), "b[] c[]");
        for (filter, part) in [
            ("d", "not among the hosts (a, b, c)"),
            ("a:4", "slots 0 to 3, not 4"),
            ("a:1,1", "named twice"),
            ("a:0,1.2", "\"1.2\" is not a device number"),
            ("a@a", "named twice"),
        ] {
            let message = included(filter).unwrap_err().to_string();
            assert!(message.contains(part), "{message}");
        }
        assert!(excluded("a,b,c").unwrap_err().to_string().contains("no host is left"));
        assert!(excluded("c:0").unwrap_err().to_string().contains("c slots=N"));
    }

    #[test]
    fn this_machine_by_its_names() {
        for name in ["localhost", "127.0.0.1", "127.3.2.1", "::1", "[::1]", "n7", "n7.cluster"] {
            assert!(is_this_machine(name, "n7.cluster"), "{name}");
        }
        for name in ["n8", "n7.other", "10.0.0.1", ""] {
            assert!(!is_this_machine(name, "n7.cluster"), "{name}");
        }
        assert!(!is_this_machine("", ""));
    }
}
