//! The kernel sources, and which programs are made of them: one per case (types, formats, head dimension),
//! so that a run compiles and loads only what it uses.

use crate::DType;

/// Text that is put before every source.
const PRELUDE: &str = include_str!("../../cu/prelude.cuh");

/// Text that is put before the sources of attention on tensor cores.
const TILES: &str = include_str!("../../cu/attention_tiles.cuh");

/// How the parameters of an update are stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Master {
    /// f32 parameters that are their own master.
    Own,
    /// bf16 parameters with an f32 master.
    Bf16,
    /// bf16 parameters with a 16-bit remainder.
    Split,
    /// f16 parameters with an f32 master.
    F16,
}

/// Which formula the update program holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Formula {
    /// [`crate::ops::AdamW`]
    AdamW,
    /// [`crate::ops::Sophia`]
    Sophia,
}

/// How attention on tensor cores is cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tiles {
    /// One tile of keys and of values in the forward; a backward of 64 × 64 with dQ in a kernel of its own
    /// (attention_backward.cu). What every device with 97 KiB for a block can run, and the one way for heads of 256.
    Small,
    /// Two tiles of keys and of values in the forward; a backward of 64 queries and as many keys as the head has
    /// columns (64 or 128), which adds dQ up in scratch in a fixed order (attention_ordered.cu). What is used where
    /// it fits: the fewest products, each operand from shared memory used twice.
    Large,
}

impl Tiles {
    /// Both.
    pub const ALL: [Tiles; 2] = [Tiles::Small, Tiles::Large];

    /// Tiles of keys, and of values, that the forward has in shared memory.
    const fn stages(self) -> u32 {
        match self {
            Tiles::Small => 1,
            Tiles::Large => 2,
        }
    }
}

/// One compilation unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Program {
    /// Conversion from the first type to the second.
    Cast(DType, DType),
    /// Embedding rows and their gradient.
    Embed(DType),
    /// RMSNorm.
    Rmsnorm(DType),
    /// Bias, and sums over rows.
    Columns(DType),
    /// Rotary embedding.
    Rope(DType),
    /// SwiGLU.
    Swiglu(DType),
    /// Cross entropy. With clusters of blocks where the flag is set (16 bits on compute capability 9.0 and up).
    Classify(DType, bool),
    /// Sums, sums of squares, and sums of two.
    Reduce(DType),
    /// The closing of the norm.
    Finish,
    /// Optimizer update: parameter storage, gradient, first and second moment, formula.
    Update(Master, DType, DType, DType, Formula),
    /// Sophia's estimate: gradient, estimate.
    Hessian(DType, DType),
    /// Attention on tensor cores (f16 or bf16); heads padded to 64, 128 or 256 (the last with
    /// [`Tiles::Small`] alone); with document masks where the flag is set.
    Attention(DType, u32, Tiles, bool),
    /// Attention in f32 arithmetic.
    AttentionAny(DType),
    /// Attention with materialised scores.
    AttentionPlain(DType),
}

/// A type's name in the sources.
fn scalar(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float",
        DType::F16 => "f16",
        DType::Bf16 => "bf16",
        DType::F64 | DType::I32 | DType::Rem16 | DType::Q8 => {
            panic!("kernels do not compute in {dtype:?}")
        }
    }
}

/// A moment format's number in update.cu.
fn moment(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0,
        DType::Bf16 => 1,
        DType::Q8 => 2,
        DType::F64 | DType::F16 | DType::I32 | DType::Rem16 => {
            panic!("moments are not kept in {dtype:?}")
        }
    }
}

impl Program {
    /// File name of the source.
    pub const fn file(self) -> &'static str {
        match self {
            Program::Cast(..) => "cast.cu",
            Program::Embed(_) => "embed.cu",
            Program::Rmsnorm(_) => "rmsnorm.cu",
            Program::Columns(_) => "columns.cu",
            Program::Rope(_) => "rope.cu",
            Program::Swiglu(_) => "swiglu.cu",
            Program::Classify(..) => "classify.cu",
            Program::Reduce(_) => "reduce.cu",
            Program::Finish => "finish.cu",
            Program::Update(..) | Program::Hessian(..) => "update.cu",
            Program::Attention(..) => "attention.cu",
            Program::AttentionAny(_) => "attention_any.cu",
            Program::AttentionPlain(_) => "attention_plain.cu",
        }
    }

    /// The source with the prelude before it.
    pub fn text(self) -> String {
        let body = match self {
            Program::Cast(..) => include_str!("../../cu/cast.cu"),
            Program::Embed(_) => include_str!("../../cu/embed.cu"),
            Program::Rmsnorm(_) => include_str!("../../cu/rmsnorm.cu"),
            Program::Columns(_) => include_str!("../../cu/columns.cu"),
            Program::Rope(_) => include_str!("../../cu/rope.cu"),
            Program::Swiglu(_) => include_str!("../../cu/swiglu.cu"),
            Program::Classify(..) => include_str!("../../cu/classify.cu"),
            Program::Reduce(_) => include_str!("../../cu/reduce.cu"),
            Program::Finish => include_str!("../../cu/finish.cu"),
            Program::Update(..) | Program::Hessian(..) => include_str!("../../cu/update.cu"),
            Program::Attention(_, _, tiles, _) => {
                let backward = match tiles {
                    Tiles::Small => {
                        concat!("\n#line 1 \"attention_backward.cu\"\n", include_str!("../../cu/attention_backward.cu"))
                    }
                    Tiles::Large => {
                        concat!("\n#line 1 \"attention_ordered.cu\"\n", include_str!("../../cu/attention_ordered.cu"))
                    }
                };
                let forward = include_str!("../../cu/attention.cu");
                &format!("{TILES}\n#line 1 \"attention.cu\"\n{forward}{backward}")
            }
            Program::AttentionAny(_) => include_str!("../../cu/attention_any.cu"),
            Program::AttentionPlain(_) => include_str!("../../cu/attention_plain.cu"),
        };
        format!("{PRELUDE}\n#line 1 \"{}\"\n{body}", self.file())
    }

    /// Compiler options, without the architecture.
    pub fn options(self) -> Vec<String> {
        let real = |dtype| format!("-DREAL={}", scalar(dtype));
        let mut options = vec!["--std=c++17".to_owned()];
        match self {
            Program::Cast(source, target) => {
                options.push(format!("-DSOURCE={}", scalar(source)));
                options.push(format!("-DTARGET={}", scalar(target)));
            }
            Program::Embed(dtype)
            | Program::Rmsnorm(dtype)
            | Program::Columns(dtype)
            | Program::Rope(dtype)
            | Program::Swiglu(dtype)
            | Program::Reduce(dtype)
            | Program::AttentionAny(dtype)
            | Program::AttentionPlain(dtype) => options.push(real(dtype)),
            Program::Classify(dtype, clusters) => {
                options.push(real(dtype));
                if clusters {
                    options.push("-DCLUSTERS".to_owned());
                }
            }
            Program::Attention(dtype, head, tiles, masked) => {
                options.push(real(dtype));
                options.push(format!("-DHEAD={head}"));
                options.push(format!("-DSTAGES={}", tiles.stages()));
                if masked {
                    options.push("-DMASKED".to_owned());
                }
            }
            Program::Finish | Program::Update(..) | Program::Hessian(..) => {
                // The same bits as the CPU: every operation rounded on its own, as IEEE says.
                for option in ["--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"] {
                    options.push(option.to_owned());
                }
            }
        }
        match self {
            Program::Update(master, gradient, first, second, formula) => options.extend([
                format!("-DMASTER={}", master as u32),
                format!("-DGRADIENT={}", scalar(gradient)),
                format!("-DFIRST={}", moment(first)),
                format!("-DSECOND={}", moment(second)),
                format!("-DRULE={}", formula as u32),
            ]),
            Program::Hessian(gradient, estimate) => options.extend([
                "-DMASTER=0".to_owned(),
                format!("-DGRADIENT={}", scalar(gradient)),
                "-DFIRST=0".to_owned(),
                format!("-DSECOND={}", moment(estimate)),
                "-DRULE=2".to_owned(),
            ]),
            _ => {}
        }
        options
    }

    /// Dynamic shared memory of a kernel in bytes, where it has any. `head_dim` is D.
    pub(crate) fn shared_bytes(self, kernel: &str, head_dim: u32) -> u32 {
        match (self, kernel) {
            // Queries, keys, values.
            (Program::Attention(_, head, tiles, _), "attention_forward") => {
                let rows = if head == 256 { 64 } else { 128 };
                (rows + 2 * tiles.stages() * 64) * head * 2
            }
            // Two tiles that stay, two stages of two that pass; two stages of two rows of f32.
            (Program::Attention(_, head, ..), "attention_backward_q") => 6 * 64 * head * 2,
            (Program::Attention(_, head, ..), "attention_backward_kv") => 6 * 64 * head * 2 + 4 * 64 * 4,
            // Keys and values; probabilities and their gradients; two stages of two tiles and two rows of f32.
            (Program::Attention(_, head, ..), "attention_backward_ordered") => {
                (2 * head + 6 * 64) * head * 2 + 4 * 64 * 4
            }
            // 16 rows unpadded, 32 rows padded by one.
            (Program::AttentionAny(_), "attention_forward") => (16 * head_dim + 2 * 32 * (head_dim + 1)) * 4,
            (Program::AttentionAny(_), "attention_backward_q" | "attention_backward_kv") => {
                (2 * 16 * head_dim + 2 * 32 * (head_dim + 1)) * 4
            }
            _ => 0,
        }
    }

    /// Kernels whose dynamic shared memory may exceed what every device gives unasked.
    pub(crate) const fn large_kernels(self) -> &'static [&'static str] {
        match self {
            Program::Attention(..) | Program::AttentionAny(_) => {
                &["attention_forward", "attention_backward_q", "attention_backward_kv", "attention_backward_ordered"]
            }
            _ => &[],
        }
    }

    /// Every program that a run can ask for; `clusters` as in [`Program::Classify`]. For checks.
    pub fn all(clusters: bool) -> Vec<Program> {
        const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];
        const MOMENTS: [DType; 3] = [DType::F32, DType::Bf16, DType::Q8];
        let mut all = vec![Program::Finish];
        for dtype in TYPES {
            all.extend([
                Program::Embed(dtype),
                Program::Rmsnorm(dtype),
                Program::Columns(dtype),
                Program::Rope(dtype),
                Program::Swiglu(dtype),
                Program::Reduce(dtype),
                Program::Classify(dtype, clusters && dtype != DType::F32),
                Program::AttentionAny(dtype),
                Program::AttentionPlain(dtype),
            ]);
            all.extend(TYPES.into_iter().filter(|&target| target != dtype).map(|target| Program::Cast(dtype, target)));
            all.extend(MOMENTS.map(|estimate| Program::Hessian(dtype, estimate)));
            if dtype != DType::F32 {
                for masked in [false, true] {
                    all.push(Program::Attention(dtype, 256, Tiles::Small, masked));
                    for head in [64, 128] {
                        all.extend(Tiles::ALL.map(|tiles| Program::Attention(dtype, head, tiles, masked)));
                    }
                }
            }
        }
        let storages = [
            (Master::Own, DType::F32),
            (Master::Bf16, DType::Bf16),
            (Master::Bf16, DType::F32),
            (Master::Split, DType::Bf16),
            (Master::Split, DType::F32),
            (Master::F16, DType::F16),
            (Master::F16, DType::F32),
        ];
        for (master, gradient) in storages {
            for first in MOMENTS {
                for second in MOMENTS {
                    for formula in [Formula::AdamW, Formula::Sophia] {
                        all.push(Program::Update(master, gradient, first, second, formula));
                    }
                }
            }
        }
        all
    }
}
