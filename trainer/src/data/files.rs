//! Which files an input names: a file, a folder, or a glob.

use std::path::{Path, PathBuf};

use super::DataSpec;
use super::format::ending;
use crate::error::{Error, Result};

/// Endings that a folder is searched for, alone or before `.gz` or `.zst`; anything else must be named or matched by a
/// glob.
const FOLDER_ENDINGS: &[&str] = &["txt", "jsonl", "ndjson", "json", "parquet"];
/// Endings of token files; a folder that holds one is read for these alone.
const TOKEN_ENDINGS: &[&str] = &["bin", "idx"];
/// Folders within folders beyond this are taken for a loop.
const DEPTH_MAX: usize = 64;

/// The files of all inputs, each once, in a fixed order: as given, a folder's or glob's sorted by path.
///
/// Names that begin with a dot are never matched (editors' and archivers' leavings), symbolic links to folders
/// are not followed.
///
/// # Errors
/// If an input names nothing.
pub(super) fn expand(spec: &DataSpec, notices: &mut Vec<String>) -> Result<Vec<PathBuf>> {
    let (inputs, flag) = (&spec.inputs, spec.flag);
    if inputs.is_empty() {
        return Err(Error::Usage(format!("no data: give {flag} with a text, jsonl or token file, a folder or a glob")));
    }
    let mut all: Vec<PathBuf> = Vec::new();
    for input in inputs {
        let path = Path::new(input);
        let found = if path.is_file() {
            vec![path.to_path_buf()]
        } else if path.is_dir() {
            folder(path, flag, notices)?
        } else if input.contains(['*', '?']) {
            glob(input, flag)?
        } else if path.exists() {
            return Err(Error::Usage(format!(
                "{flag} {input}: it is neither a regular file nor a folder; write the data into a file, which can be read \
                 as often as there are ranks"
            )));
        } else {
            return Err(Error::Usage(format!("{flag} {input}: there is no such file or folder")));
        };
        for path in found {
            // An .idx stands for the .bin beside it.
            let path = if path.extension().is_some_and(|e| e == "idx") { path.with_extension("bin") } else { path };
            if !all.contains(&path) {
                all.push(path);
            }
        }
    }
    Ok(all)
}

fn folder(root: &Path, flag: &str, notices: &mut Vec<String>) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    walk(root, 0, &mut files)?;
    let total = files.len();
    // Where there are tokens, the rest is what they were made from, or their manifest.
    let is_tokens = |path: &PathBuf| ending(path).is_some_and(|e| TOKEN_ENDINGS.contains(&e.as_str()));
    let endings = if files.iter().any(is_tokens) { TOKEN_ENDINGS } else { FOLDER_ENDINGS };
    let packed = |path: &Path| matches!(ending(path).as_deref(), Some("gz" | "zst"));
    files.retain(|path| {
        let inner = if packed(path) { path.with_extension("") } else { path.clone() };
        ending(&inner).is_some_and(|e| endings.contains(&e.as_str()))
    });
    if files.is_empty() {
        return Err(Error::Usage(format!(
            "{flag} {}: none of its {total} files ends in .{}; a glob such as '{0}/**/*.rs' takes any text file",
            root.display(),
            FOLDER_ENDINGS.join(", .")
        )));
    }
    if files.len() < total {
        notices.push(format!(
            "{}: {} of {total} files are read, the others end in none of .{}",
            root.display(),
            files.len(),
            endings.join(", .")
        ));
    }
    files.sort();
    Ok(files)
}

fn glob(pattern: &str, flag: &str) -> Result<Vec<PathBuf>> {
    let parts: Vec<&str> = pattern.split('/').collect();
    let plain = parts.iter().take_while(|part| !part.contains(['*', '?'])).count();
    let root = match parts[..plain].join("/") {
        root if root.is_empty() && pattern.starts_with('/') => PathBuf::from("/"),
        root if root.is_empty() => PathBuf::from("."),
        root => PathBuf::from(root),
    };
    let mut files = Vec::new();
    if root.is_dir() {
        walk(&root, 0, &mut files)?;
    }
    files.retain(|path| {
        let inside = path.strip_prefix(&root).unwrap_or(path);
        let names: Vec<&str> = inside.iter().filter_map(|name| name.to_str()).collect();
        matches(&parts[plain..], &names)
    });
    if files.is_empty() {
        return Err(Error::Usage(format!("{flag} {pattern}: no file matches")));
    }
    files.sort();
    Ok(files)
}

/// Whether path parts match pattern parts; `**` stands for any number of folders.
fn matches(pattern: &[&str], path: &[&str]) -> bool {
    match (pattern.split_first(), path.split_first()) {
        (None, None) => true,
        (Some((&"**", rest)), _) => (0..=path.len()).any(|skip| matches(rest, &path[skip..])),
        (Some((part, rest)), Some((name, names))) => {
            part_matches(part.as_bytes(), name.as_bytes()) && matches(rest, names)
        }
        _ => false,
    }
}

fn part_matches(pattern: &[u8], name: &[u8]) -> bool {
    match pattern.split_first() {
        None => name.is_empty(),
        Some((b'*', rest)) => (0..=name.len()).any(|skip| part_matches(rest, &name[skip..])),
        Some((b'?', rest)) => !name.is_empty() && part_matches(rest, &name[1..]),
        Some((byte, rest)) => name.first() == Some(byte) && part_matches(rest, &name[1..]),
    }
}

fn walk(folder: &Path, depth: usize, files: &mut Vec<PathBuf>) -> Result<()> {
    let failed = |e: std::io::Error| Error::Usage(format!("{}: cannot be listed: {e}", folder.display()));
    if depth > DEPTH_MAX {
        return Err(Error::Usage(format!("{}: more than {DEPTH_MAX} folders deep", folder.display())));
    }
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let kind = entry.file_type().map_err(failed)?;
        if kind.is_dir() {
            walk(&entry.path(), depth + 1, files)?;
        } else if entry.path().is_file() {
            files.push(entry.path());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_match_by_folder() {
        let yes = |pattern: &str, path: &str| {
            let split = |s: &str| s.split('/').map(str::to_owned).collect::<Vec<_>>();
            let (pattern, path) = (split(pattern), split(path));
            matches(
                &pattern.iter().map(String::as_str).collect::<Vec<_>>(),
                &path.iter().map(String::as_str).collect::<Vec<_>>(),
            )
        };
        assert!(yes("**/*.rs", "a.rs") && yes("**/*.rs", "x/y/a.rs") && yes("x/*/a?.rs", "x/y/ab.rs"));
        assert!(!yes("*.rs", "x/a.rs") && !yes("**/*.rs", "a.md") && !yes("x/**", "y/a"));
    }

    #[test]
    fn dot_files_are_skipped_and_order_is_fixed() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["b.jsonl", "._b.jsonl", ".b.swp", "README", "b.jsonl.gz", "a.txt", "c.tar.gz", "c.parquet"] {
            std::fs::write(folder.path().join(name), "{}").unwrap();
        }
        let mut notices = Vec::new();
        let root = folder.path().display().to_string();
        let found = expand(&DataSpec::new(vec![root.clone(), format!("{root}/*.txt")]), &mut notices).unwrap();
        let names: Vec<_> = found.iter().map(|p| p.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["a.txt", "b.jsonl", "b.jsonl.gz", "c.parquet"]);
        assert!(notices[0].contains("4 of 6 files"), "{notices:?}");
        for missing in ["nowhere.txt".to_string(), format!("{root}/*.py")] {
            let spec = DataSpec::new(vec![missing.clone()]);
            assert!(expand(&spec, &mut notices).unwrap_err().to_string().contains(&missing));
        }
        assert!(expand(&DataSpec::new(vec![]), &mut notices).is_err());
        let device = expand(&DataSpec::new(vec!["/dev/null".into()]), &mut notices).unwrap_err().to_string();
        assert!(device.contains("/dev/null: it is neither a regular file nor a folder"), "{device}");
    }
}
