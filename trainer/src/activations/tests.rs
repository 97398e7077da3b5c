//! Laws of the layout: nothing overlaps that is alive together, and a 7B model has the size that was promised.

use super::*;
use castor_kernels::{
    Tier,
    dry::{Dry, DryProfile},
};

fn dry() -> Dry {
    Dry::new(
        1,
        0,
        DryProfile {
            attention_scratch_bytes: |shape, _| 4 * shape.batch * shape.heads * shape.sequence,
            rmsnorm_scratch_bytes: |_, columns| 4 * 64 * columns,
            ..DryProfile::default()
        },
    )
}

fn small(keep: Vec<Keep>) -> Request {
    Request {
        shape: Shape {
            vocabulary: 50,
            hidden: 24,
            ffn: 40,
            blocks: keep.len() as u64,
            heads: 4,
            kv_heads: 2,
            head_dim: 8,
            eps: 1e-5,
            qkv_bias: true,
            o_bias: true,
            mlp_bias: true,
            tied: false,
        },
        attention: AttentionKind { sequence: 10, fused: true, deterministic: true, documents: false },
        batch: 2,
        micro_batches: 3,
        dtype: DType::Bf16,
        keep,
        first_keep: Keep::All,
        logits_bytes: 1,
    }
}

fn llama_7b(keep: Keep) -> Request {
    Request {
        shape: Shape {
            vocabulary: 32_000,
            hidden: 4096,
            ffn: 11_008,
            blocks: 32,
            heads: 32,
            kv_heads: 32,
            head_dim: 128,
            eps: 1e-5,
            qkv_bias: false,
            o_bias: false,
            mlp_bias: false,
            tied: false,
        },
        attention: AttentionKind { sequence: 2048, fused: true, deterministic: true, documents: false },
        batch: 8,
        micro_batches: 1,
        dtype: DType::Bf16,
        keep: vec![keep; 32],
        first_keep: Keep::All,
        logits_bytes: LOGITS_BYTES,
    }
}

/// Every place that a block names, by name.
fn places(m: &block::Memory) -> [(&'static str, View); 14] {
    [
        ("input", m.input),
        ("n1", m.n1),
        ("rstd1", m.rstd1),
        ("qkv", m.qkv),
        ("attention", m.attention),
        ("stats", m.stats),
        ("h2", m.h2),
        ("n2", m.n2),
        ("rstd2", m.rstd2),
        ("gate_up", m.gate_up),
        ("act", m.act),
        ("wide", m.wide),
        ("narrow", m.narrow),
        ("scratch", m.scratch),
    ]
}

/// Names of what is kept at a level.
fn kept(level: Keep) -> &'static [&'static str] {
    match level {
        Keep::All => &["input", "n1", "rstd1", "qkv", "attention", "stats", "h2", "n2", "rstd2", "gate_up", "act"],
        Keep::Selective => &["input", "qkv", "attention", "stats", "h2", "gate_up"],
        Keep::Ffn => &["input", "qkv", "attention", "stats", "h2"],
        Keep::Block => &["input"],
    }
}

#[test]
fn what_is_kept_is_touched_by_nothing_else() {
    let levels = vec![Keep::All, Keep::Block, Keep::Selective, Keep::Ffn];
    let activations = Activations::new(small(levels.clone()), &dry());
    let base = Span::new(Tier::Device, 4096, activations.bytes());
    let mut owned: Vec<(String, Span)> = Vec::new();
    let mut shared: Vec<(String, Span)> = Vec::new();
    for (block, &level) in levels.iter().enumerate() {
        for micro in 0..3 {
            let memory = activations.block(base, block as u64, micro, 2);
            for (name, view) in places(&memory) {
                let list = if kept(level).contains(&name) { &mut owned } else { &mut shared };
                list.push((format!("{name} of block {block} micro {micro}"), view.span));
            }
        }
    }
    for micro in 0..3 {
        shared.push((format!("hidden {micro}"), activations.hidden(base, micro, 2).span));
        shared.push((format!("d_hidden {micro}"), activations.d_hidden(base, micro, 2).span));
        let head = activations.head(base, micro, 2);
        shared.push(("logits".into(), head.logits.span));
        shared.push(("losses".into(), head.losses.span));
    }
    for (index, (name, span)) in owned.iter().enumerate() {
        assert!(span.end() <= base.end(), "{name}");
        for (other, place) in owned[index + 1..].iter().chain(&shared) {
            assert!(!span.overlaps(*place), "{name} and {other}");
        }
    }
}

#[test]
fn what_a_block_uses_at_once_lies_apart() {
    // The second norm's output takes the first one's place, and act that of the wide gradient: by intent.
    let taken_over = |a: &str, b: &str| matches!((a, b), ("n1", "n2") | ("rstd1", "rstd2") | ("act", "wide"));
    for level in Keep::ALL {
        let activations = Activations::new(small(vec![level; 2]), &dry());
        let base = Span::new(Tier::Device, 0, activations.bytes());
        let memory = activations.block(base, 1, 2, 2);
        let mut list = places(&memory).to_vec();
        list.push(("d_hidden", activations.d_hidden(base, 2, 2)));
        list.push(("output", activations.block_output(base, 1, 2, 2)));
        for (index, (name, view)) in list.iter().enumerate() {
            for (other, place) in &list[index + 1..] {
                let apart = !view.span.overlaps(place.span);
                assert!(apart || taken_over(name, other), "{level:?}: {name} and {other}");
            }
        }
    }
}

#[test]
fn the_head_frees_a_hidden_state_before_its_place_is_taken() {
    let activations = Activations::new(small(vec![Keep::All]), &dry());
    let base = Span::new(Tier::Device, 0, activations.bytes());
    for micro in 0..3 {
        let gradient = activations.d_hidden(base, micro, 2).span;
        for later in micro..3 {
            assert!(!gradient.overlaps(activations.hidden(base, later, 2).span));
        }
        let head = activations.head(base, micro, 2);
        for place in [head.normed, head.d_normed, head.logits, head.losses, head.rstd, head.scratch] {
            assert!(!gradient.overlaps(place.span) && !head.hidden.span.overlaps(place.span));
        }
    }
}

#[test]
fn less_than_all_is_alive_at_every_point() {
    for level in Keep::ALL {
        let activations = Activations::new(small(vec![level; 3]), &dry());
        let phases = (0..3).flat_map(|block| [Phase::Forward(block), Phase::Backward(block)]);
        let others = [Phase::Embed, Phase::Head, Phase::EmbedBackward, Phase::Update];
        for phase in phases.chain(others) {
            let live = activations.live_bytes(phase, 3);
            assert!(live <= activations.bytes(), "{level:?} {phase:?}: {live} of {}", activations.bytes());
        }
    }
}

#[test]
fn seven_billion_parameters_take_what_the_arithmetic_says() {
    let tokens = 16_384;
    let per_token = |level: Keep| {
        let activations = Activations::new(llama_7b(level), &dry());
        let kept = activations.kept_bytes(level) as f64 / f64::from(tokens);
        (kept, activations.bytes() - 32 * activations.kept_bytes(level))
    };
    // C = 4096, F = 11008 in bf16, and 4 bytes per head of attention statistics.
    let expected = [
        (Keep::All, 2.0 * (5.0 * 4096.0 + 12_288.0 + 3.0 * 11_008.0) + 128.0 + 8.0),
        (Keep::Selective, 2.0 * (3.0 * 4096.0 + 12_288.0 + 2.0 * 11_008.0) + 128.0),
        (Keep::Ffn, 2.0 * (3.0 * 4096.0 + 12_288.0) + 128.0),
        (Keep::Block, 2.0 * 4096.0),
    ];
    for (level, bytes) in expected {
        let (kept, scratch) = per_token(level);
        assert!((kept - bytes).abs() < 1.0, "{level:?} keeps {kept} bytes per token and block, not {bytes}");
        assert!(scratch < 3_000_000_000, "{level:?} needs {scratch} bytes of scratch");
    }
}

#[test]
fn logits_come_in_whole_tiles_within_their_limit() {
    assert_eq!(logits_rows(256 << 20, 64_000, 16_384), 4096);
    assert_eq!(logits_rows(1 << 20, 64_000, 16_384), 16);
    assert_eq!(logits_rows(1, 64_000, 16_384), 1);
    assert_eq!(logits_rows(u64::MAX, 64_000, 100), 100);
}
