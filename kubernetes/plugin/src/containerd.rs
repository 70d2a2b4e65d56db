//! Determines from containerd's settings whether containerd heeds CDI devices. containerd 1.7 heeds
//! CDI devices only if `enable_cdi` is true. Later versions heed CDI devices unless `enable_cdi` is
//! false. The format of the settings depends on `version`. Only containerd 2 supports version 3.

use std::path::{Path, PathBuf};

use toml::{Table, Value};

/// The names of the section for containerd's kubelet plugin, from the oldest version of the
/// settings to the newest.
const SECTIONS: [&str; 3] = ["cri", "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"];

/// The first version of the settings in which CDI devices are enabled by default.
const ENABLED_SINCE: i64 = 3;

/// Returns the reason why containerd ignores CDI devices, according to its settings. Without
/// settings, returns `None`, because containerd with default settings cannot be distinguished from
/// other runtimes.
pub fn ignores_cdi(path: &Path) -> Option<String> {
    let main = read(path).ok()??;
    let disabled = main.get("disabled_plugins").and_then(Value::as_array).into_iter().flatten();
    // Docker's packages disable this plugin, in which case containerd creates no containers for
    // kubelet.
    if disabled.filter_map(Value::as_str).any(|plugin| SECTIONS.contains(&plugin)) {
        return None;
    }
    let mut enabled = enable_cdi(&main);
    for file in imports(path, &main) {
        // If a file is unreadable, the result is unknown, because the file might enable CDI
        // devices.
        enabled = enable_cdi(&read(&file).ok()??).or(enabled);
    }
    let version = main.get("version").and_then(Value::as_integer).unwrap_or(1);
    let why = match enabled {
        Some(true) => return None,
        Some(false) => "sets enable_cdi = false",
        None if version >= ENABLED_SINCE => return None,
        None => "does not set enable_cdi, which containerd 1.7 needs",
    };
    let section = if version >= ENABLED_SINCE { SECTIONS[2] } else { SECTIONS[1] };
    Some(format!(
        "containerd ignores CDI devices: {} {why}. Set enable_cdi = true in [plugins.\"{section}\"] and restart \
         containerd, or set inject = \"mounts\"",
        path.display()
    ))
}

/// Returns the reason why existing settings cannot be read.
pub fn unreadable(path: &Path) -> Option<String> {
    files(path).find_map(|file| read(&file).err())
}

/// Returns the files that the settings consist of.
pub fn files(path: &Path) -> impl Iterator<Item = PathBuf> {
    let main = read(path).ok().flatten().unwrap_or_default();
    [path.to_owned()].into_iter().chain(imports(path, &main))
}

fn enable_cdi(settings: &Table) -> Option<bool> {
    let plugins = settings.get("plugins")?.as_table()?;
    let mut all = SECTIONS.iter().rev().filter_map(|section| plugins.get(*section)?.get("enable_cdi")?.as_bool());
    all.next()
}

/// Returns the imported files. Patterns may be relative paths. Later files take precedence.
fn imports(path: &Path, settings: &Table) -> Vec<PathBuf> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    let patterns = settings.get("imports").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
    let paths = patterns.map(|pattern| directory.join(pattern).display().to_string());
    paths.flat_map(|pattern| glob::glob(&pattern).into_iter().flatten().flatten()).collect()
}

/// Reads a settings file. Returns `None` if the file does not exist.
fn read(path: &Path) -> Result<Option<Table>, String> {
    let wrong = |why: String| format!("{}: {why}", path.display());
    match std::fs::read_to_string(path) {
        Ok(text) => text.parse().map(Some).map_err(|e: toml::de::Error| wrong(e.message().to_owned())),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(wrong(e.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containerd_ignores_cdi_if_disabled_or_by_default_before_2() {
        let directory = std::env::temp_dir().join(format!("nvshare-plugin-containerd-{}", std::process::id()));
        std::fs::create_dir_all(directory.join("conf.d")).expect("a directory");
        let path = directory.join("config.toml");
        assert_eq!(ignores_cdi(&path), None);
        let cri = "[plugins.\"io.containerd.grpc.v1.cri\"]\n";
        let runtime = "[plugins.\"io.containerd.cri.v1.runtime\"]\n";
        for (text, said) in [
            ("version = 2\n".to_owned(), "does not set enable_cdi"),
            (String::new(), "does not set enable_cdi"),
            (format!("version = 2\n{cri}enable_cdi = false\n"), "grpc.v1.cri\"] and restart"),
            (format!("version = 2\n{cri}enable_cdi = true\n"), ""),
            ("version = 3\n".to_owned(), ""),
            (format!("version = 3\n{runtime}enable_cdi = false\n"), "sets enable_cdi = false"),
            (format!("version = 3\n{runtime}enable_cdi = true\n"), ""),
            // kubelet does not use a containerd with these settings.
            ("version = 2\ndisabled_plugins = [\"cri\"]\n".to_owned(), ""),
            ("version = 2\nimports = [\"conf.d/*.toml\"]\n".to_owned(), ""),
            (
                format!(
                    "version = 2\nimports = [\"{}/conf.d/*.toml\"]\n{cri}enable_cdi = false\n",
                    directory.display()
                ),
                "",
            ),
            ("version = 2\nimports = [\"none/*.toml\"]\n".to_owned(), "does not set"),
            // Invalid settings are treated as unknown.
            ("version = ".to_owned(), ""),
        ] {
            std::fs::write(directory.join("conf.d/99-nvidia.toml"), format!("version = 2\n{cri}enable_cdi = true\n"))
                .expect("a file");
            std::fs::write(&path, &text).expect("a file");
            let why = ignores_cdi(&path).unwrap_or_default();
            assert!(why.contains(said) && why.is_empty() == said.is_empty(), "{text:?}: {why:?}");
        }
        assert!(unreadable(&path).is_some_and(|why| why.contains("config.toml")));
        std::fs::remove_dir_all(directory).expect("it is removed");
    }
}
