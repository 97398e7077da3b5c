//! Every kernel compiles for every architecture Castor names, and none spills registers unseen.
//!
//! Needs NVRTC (`pip install nvidia-cuda-nvrtc==13.0.88`), no GPU. It is looked for in `CASTOR_NVRTC_DIR`,
//! then in the packages of `VIRTUAL_ENV` and of the usual Python folders; without it the test says
//! "skipped".
//!
//! A kernel that may spill says so in its source, on a line of its own:
//! `// spills allowed: KERNEL with OPTION: why`, which holds where the program has that option.

use castor_kernels::cuda::nvrtc::compile;
use castor_kernels::cuda::programs::Program;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use std::path::{Path, PathBuf};

/// Oldest, measured and newest.
const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_90a", "sm_100"];

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

/// The programs to compile. All of them on all architectures take many minutes (`CASTOR_CU_ALL=1`); without
/// that, f16 (the same code as bf16) and the rarer heads are left to the measured architecture, and of the
/// update's 126 storage combinations every fifth is taken, which meets every format, gradient and formula.
fn programs(architecture: &str, every: bool) -> Vec<Program> {
    let f16 = |program: &Program| format!("{program:?}").contains("F16");
    let mut updates = 0;
    let mut programs = Program::all(architecture != "sm_80");
    programs.retain(|program| {
        updates += u32::from(matches!(program, Program::Update(..)));
        every
            || match program {
                Program::Update(..) => updates % 5 == 0,
                Program::Attention(_, 64 | 256) => architecture == "sm_90a",
                program => architecture == "sm_90a" || !f16(program),
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
