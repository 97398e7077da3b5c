//! Updates: the same bits on the device, on the host engine beside the device, and on the CPU backend.

use super::Case;
use super::rig::{Rig, encode};
use castor_kernels::ops::{AdamW, Sophia, State, Update};
use castor_kernels::{Backend, DType, Span, Stream, Tier, View, rng};

pub const CASES: &[Case] = &[("updates", updates), ("updates_on_host", updates_on_host)];

const ADAMW: Update = Update::AdamW(AdamW {
    lr: 1e-3,
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    weight_decay: 0.1,
    inv_bias1: 10.0,
    inv_bias2: 20.0,
});
const SOPHIA: Update = Update::Sophia(Sophia { lr: 1e-3, beta1: 0.965, rho: 0.04, weight_decay: 0.1 });

/// (weights, master, moments)
const FORMATS: [(DType, Option<DType>, DType); 8] = [
    (DType::F32, None, DType::F32),
    (DType::F32, None, DType::Bf16),
    (DType::Bf16, Some(DType::F32), DType::F32),
    (DType::Bf16, Some(DType::Rem16), DType::F32),
    (DType::Bf16, Some(DType::Rem16), DType::Bf16),
    (DType::Bf16, Some(DType::Rem16), DType::Q8),
    (DType::F16, Some(DType::F32), DType::F32),
    (DType::F16, Some(DType::F32), DType::Q8),
];

/// The bytes of a state before the update: parameter, gradient, master, first, second.
fn initial(count: u64, (weight, master, moment): (DType, Option<DType>, DType), gradient: DType) -> [Vec<u8>; 5] {
    let normal = |seed, scale: f32| -> Vec<f32> { (0..count).map(|i| rng::normal(seed, i) * scale).collect() };
    let masters = normal(1, 0.02);
    let moments = |seed, positive: bool| match moment {
        // Codes of any value, and one small positive scale for each block.
        DType::Q8 => {
            let codes = (0..count).map(|i| match (rng::bits(seed, i, 0) as u8, positive) {
                (code, true) => code,
                (code, false) => code.max(1).wrapping_add(if code == 128 { 1 } else { 0 }),
            });
            let mut bytes: Vec<u8> = codes.collect();
            (0..count.div_ceil(256)).for_each(|_| bytes.extend(1e-4f32.to_le_bytes()));
            bytes
        }
        other => {
            let values = normal(seed, 0.01);
            encode(other, &values.iter().map(|v| if positive { v * v } else { *v }).collect::<Vec<_>>())
        }
    };
    let (mut weights, mut rest) = (encode(weight, &masters), Vec::new());
    match master {
        Some(DType::Rem16) => {
            let parts: Vec<_> = masters.iter().map(|m| castor_kernels::numeric::split(*m)).collect();
            weights = parts.iter().flat_map(|(w, _)| w.to_le_bytes()).collect();
            rest = parts.iter().flat_map(|(_, r)| r.to_le_bytes()).collect();
        }
        Some(other) => rest = encode(other, &masters),
        None => {}
    }
    [weights, encode(gradient, &normal(2, 1.0)), rest, moments(3, false), moments(4, true)]
}

fn state(
    spans: [Span; 5],
    (weight, master, moment): (DType, Option<DType>, DType),
    gradient: DType,
    count: u64,
) -> State {
    State {
        parameter: spans[0].view(weight),
        gradient: spans[1].view(gradient),
        master: master.map(|dtype| spans[2].view(dtype)),
        first: spans[3].view(moment),
        second: spans[4].view(moment),
        decayed: count / 2,
        seed: 77,
        first_element: 1 << 33,
    }
}

fn check(rig: &Rig, what: &str, spans: [Span; 5]) {
    for (name, span) in ["weights", "gradient", "master", "first", "second"].into_iter().zip(spans) {
        if span.bytes > 0 {
            rig.same_bits(&format!("{name} of {what}"), View { span, dtype: DType::Q8 });
        }
    }
}

fn updates() {
    let rig = Rig::new();
    // Blocks of 256 are whole in a chunk; the last one may be short only where moments are not blockwise.
    for count in [256, 4096, 100 * 256] {
        for format in FORMATS {
            for gradient in [DType::F32, format.0] {
                for update in [ADAMW, SOPHIA] {
                    for finite in [1.0, 0.0] {
                        rig.clear();
                        let spans = initial(count, format, gradient).map(|bytes| rig.bytes(DType::Q8, &bytes).span);
                        let control = rig.values(DType::F32, &[0.5 * finite, 1.0, finite, 0.0]);
                        let state = state(spans, format, gradient, count);
                        rig.run(|ops| ops.update(update, state, control));
                        check(&rig, &format!("{update:?} {format:?} of {count}"), spans);
                        if update == SOPHIA {
                            let hessian = state.second;
                            rig.run(|ops| ops.hessian(state.gradient, hessian, 0.99, 64.0, 0.5, control));
                            check(&rig, &format!("hessian {format:?} of {count}"), spans);
                        }
                    }
                }
            }
        }
    }
}

/// On the host, with the control scalars on the device: nothing is read before the device has written them,
/// and the copy back sees the result.
fn updates_on_host() {
    let rig = Rig::new();
    let count = 64 * 256;
    for format in FORMATS {
        rig.clear();
        let bytes = initial(count, format, DType::F32);
        let mut top = 0;
        let host = bytes.clone().map(|bytes| {
            let span = Span::new(Tier::Host, top, bytes.len() as u64);
            top = span.end().next_multiple_of(4096);
            span
        });
        let control = rig.poisoned(DType::F32, 4);
        let slots = rig.values(DType::F64, &[4.0]);
        for backend in [&rig.cpu as &dyn Backend, &rig.cuda] {
            for (span, bytes) in host.iter().zip(&bytes) {
                backend.upload(*span, bytes).unwrap();
            }
            backend.norm_finish(slots, 0.0, 2.0, control);
            backend.update(ADAMW, state(host, format, DType::F32, count), control);
        }
        // The weights ride back to the device behind a mark on the host's stream.
        let weights = rig.span(bytes[0].len() as u64);
        for backend in [&rig.cpu as &dyn Backend, &rig.cuda] {
            backend.wait(Stream::HostToDevice, backend.mark(Stream::Host));
            backend.copy(Stream::HostToDevice, host[0], weights).unwrap();
            backend.join(backend.mark(Stream::HostToDevice)).unwrap();
        }
        rig.same_bits("weights copied back", weights.view(DType::Q8));
        check(&rig, &format!("an update on the host {format:?}"), host);
        // More updates than there are slots for their scalars, each by the scalars of its own time.
        for backend in [&rig.cpu as &dyn Backend, &rig.cuda] {
            for index in 0..300 {
                backend.norm_finish(slots, 0.0, 1.0 + index as f32, control);
                backend.update(ADAMW, state(host, format, DType::F32, count), control);
            }
            backend.join(backend.mark(Stream::Host)).unwrap();
        }
        check(&rig, &format!("300 updates on the host {format:?}"), host);
    }
}
