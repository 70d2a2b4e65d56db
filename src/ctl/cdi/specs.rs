//! Finds and reads the CDI files of a host.

use std::path::{Path, PathBuf};

use serde_json::Value;

/// The directories that runtimes read. The last directory takes precedence.
pub const DIRECTORIES: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];

/// The size limit of a file, in bytes.
const LARGEST: u64 = 16 << 20;

/// Lists the CDI files in a directory, by name. Returns an empty list if the directory cannot be
/// read.
pub fn files(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = directory.read_dir() else { return Vec::new() };
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).filter(|file| is_spec(file)).collect();
    files.sort();
    files
}

/// The kind of the devices in a file, such as `nvidia.com/gpu`.
pub fn kind(spec: &Value) -> &str {
    spec.get("kind").and_then(Value::as_str).unwrap_or_default()
}

/// The names of the devices in a file, without the kind.
pub fn devices(spec: &Value) -> impl Iterator<Item = &str> {
    let all = spec.get("devices").and_then(Value::as_array).into_iter().flatten();
    all.filter_map(|device| device.get("name").and_then(Value::as_str))
}

/// Reads a file as JSON or YAML, depending on its name.
///
/// # Errors
/// The file cannot be read, is larger than 16 MiB, or is invalid. The error is a sentence with the
/// path.
pub fn parse(file: &Path) -> Result<Value, String> {
    let wrong = |why: String| format!("{}: {why}", file.display());
    let size = file.metadata().map_err(|e| wrong(e.to_string()))?.len();
    if size > LARGEST {
        return Err(wrong(format!("its size of {size} bytes exceeds the limit for CDI files")));
    }
    let text = std::fs::read_to_string(file).map_err(|e| wrong(e.to_string()))?;
    if file.extension().is_some_and(|extension| extension == "json") {
        return serde_json::from_str(&text).map_err(|e| wrong(e.to_string()));
    }
    serde_saphyr::from_str(&text).map_err(|e| wrong(e.to_string()))
}

fn is_spec(file: &Path) -> bool {
    file.extension().is_some_and(|extension| ["json", "yaml", "yml"].iter().any(|known| extension == *known))
}
