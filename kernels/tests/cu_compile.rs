//! Every kernel compiles for every architecture Castor names, and none spills registers unseen.
//!
//! Needs NVRTC (`pip install nvidia-cuda-nvrtc==13.0.88`), no GPU. It is looked for in `CASTOR_NVRTC_DIR`,
//! then in the packages of `VIRTUAL_ENV`, of the `python3` that `PATH` names and of the usual Python folders;
//! without it the test says "skipped".
//!
//! The default takes about two minutes of CPU; `CASTOR_CU_ALL=1` compiles every program a run can ask for, which
//! takes many.
//!
//! A kernel that may spill says so in its source, on a line of its own:
//! `// spills allowed: KERNEL with OPTION: why`, which holds where the program has that option.

use castor_kernels::DType;
use castor_kernels::cuda::nvrtc::compile;
use castor_kernels::cuda::programs::{Formula, Master, Program, Tiles};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use std::path::{Path, PathBuf};

/// The architecture Castor is measured on.
const MEASURED: &str = "sm_90a";
/// Oldest, measured and newest.
const ARCHITECTURES: [&str; 3] = ["sm_80", MEASURED, "sm_100"];

/// Updates that together meet every storage, moment format and formula. The first stands for all of them on
/// architectures that are not measured.
const UPDATES: [Program; 6] = [
    Program::Update(Master::Split, DType::Bf16, DType::Q8, DType::Q8, Formula::AdamW),
    Program::Update(Master::Split, DType::Bf16, DType::F32, DType::F32, Formula::AdamW),
    Program::Update(Master::Split, DType::Bf16, DType::Bf16, DType::Bf16, Formula::AdamW),
    Program::Update(Master::Bf16, DType::F32, DType::Bf16, DType::F32, Formula::Sophia),
    Program::Update(Master::F16, DType::F16, DType::F32, DType::Q8, Formula::AdamW),
    Program::Update(Master::Own, DType::F32, DType::F32, DType::F32, Formula::AdamW),
];

/// Where the `python3` that `PATH` names keeps its packages. It is asked, because a launcher of a version
/// manager says nothing by its path.
fn packages_of_python() -> Option<PathBuf> {
    let ask = ["-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"];
    let output = std::process::Command::new("python3").args(ask).output().ok()?;
    Some(PathBuf::from(String::from_utf8(output.stdout).ok()?.trim()))
}

fn folders() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = std::env::var_os("CASTOR_NVRTC_DIR").map(PathBuf::from).into_iter().collect();
    let mut roots: Vec<PathBuf> = std::env::var_os("VIRTUAL_ENV").map(PathBuf::from).into_iter().collect();
    roots.extend(["/usr/local", "/usr"].map(PathBuf::from));
    for root in roots {
        let Ok(entries) = std::fs::read_dir(root.join("lib")) else {
            continue;
        };
        for python in entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with("python3")) {
            for packages in ["site-packages", "dist-packages"] {
                folders.push(python.path().join(packages).join("nvidia/cu13/lib"));
            }
        }
    }
    folders.extend(packages_of_python().map(|packages| packages.join("nvidia/cu13/lib")));
    folders.push(PathBuf::from("/usr/local/cuda/lib64"));
    folders
}

/// Opens NVRTC for the whole process, its builtins first: it looks for them by short name when it compiles.
fn open_nvrtc() -> Option<PathBuf> {
    let folder = folders().into_iter().find(|folder| folder.join("libnvrtc.so.13").exists())?;
    let entries = std::fs::read_dir(&folder).ok()?;
    let mut names: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    names.retain(|path| {
        let name = path.file_name().unwrap().to_string_lossy();
        name.starts_with("libnvrtc-builtins.so.13") && !name.contains(".alt")
    });
    names.push(folder.join("libnvrtc.so.13"));
    for path in names {
        // SAFETY: NVRTC's initialisers have no preconditions, and it is never closed.
        let library = unsafe { Library::open(Some(Path::new(&path)), RTLD_NOW | RTLD_GLOBAL) };
        std::mem::forget(library.unwrap_or_else(|error| panic!("{}: {error}", path.display())));
    }
    Some(folder)
}

/// (kernel, line) of every kernel that spills, from ptxas' report.
fn spills(log: &str) -> Vec<(String, String)> {
    let mut kernel = String::new();
    let mut spills = Vec::new();
    for line in log.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            kernel = rest.split('\'').next().unwrap_or_default().to_owned();
        } else if line.contains("bytes spill stores") && !line.contains(" 0 bytes spill stores, 0 bytes spill loads") {
            spills.push((kernel.clone(), line.trim().to_owned()));
        }
    }
    spills
}

/// The programs to compile: without `every`, for the measured architecture all kernels in bf16 and f32 (f16 is
/// bf16's code), for the others each source once.
fn programs(architecture: &str, every: bool) -> Vec<Program> {
    let measured = architecture == MEASURED;
    let mut programs = Program::all(architecture != "sm_80");
    programs.retain(|program| {
        every
            || match *program {
                Program::Finish => true,
                Program::Update(..) => UPDATES[0] == *program || measured && UPDATES.contains(program),
                Program::Hessian(gradient, estimate) => measured && gradient == DType::Bf16 && estimate != DType::F32,
                Program::Cast(from, to) => {
                    (from, to) == (DType::Bf16, DType::F32) || measured && (from, to) == (DType::F32, DType::Bf16)
                }
                Program::Attention(dtype, head, tiles, masked) => {
                    // A mask only adds to a program.
                    let told = masked || tiles == Tiles::Large && head == 128;
                    dtype == DType::Bf16 && if measured { told } else { head == 128 && masked }
                }
                Program::Embed(dtype)
                | Program::Rmsnorm(dtype)
                | Program::Columns(dtype)
                | Program::Rope(dtype)
                | Program::Swiglu(dtype)
                | Program::Classify(dtype, _)
                | Program::Reduce(dtype)
                | Program::AttentionAny(dtype)
                | Program::AttentionPlain(dtype) => dtype == DType::Bf16 || measured && dtype == DType::F32,
            }
    });
    programs
}

#[test]
fn every_kernel_compiles_for_every_architecture_without_unseen_spills() {
    let Some(folder) = open_nvrtc() else {
        println!("skipped: NVRTC is not installed (pip install nvidia-cuda-nvrtc==13.0.88)");
        return;
    };
    println!("NVRTC in {}", folder.display());
    let every = std::env::var_os("CASTOR_CU_ALL").is_some();
    let mut wrong = Vec::new();
    for architecture in ARCHITECTURES {
        for program in programs(architecture, every) {
            match compile(program, architecture, &["--ptxas-options=-v"]) {
                Err(error) => wrong.push(format!("{architecture} {program:?}: {error}")),
                Ok(compiled) => {
                    assert!(compiled.log.contains("Compiling entry function"), "no report: {}", compiled.log);
                    assert!(!compiled.log.contains("warning"), "{architecture} {program:?}: {}", compiled.log);
                    let (text, options) = (program.text(), program.options());
                    for (kernel, line) in spills(&compiled.log) {
                        let allowed =
                            options.iter().any(|o| text.contains(&format!("// spills allowed: {kernel} with {o}: ")));
                        if !allowed {
                            wrong.push(format!("{architecture} {program:?} {kernel}: {line}"));
                        }
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
