//! `nvsharectl cdi`: a file by which container runtimes bring GPUs and nvshare into containers (the Container Device
//! Interface, CDI).
//!
//! - `edits`: what a runtime changes of a container.
//! - `nvidia`: the file that NVIDIA's tools write, which knows what a GPU needs in a container. `nodes`: its device nodes,
//!   where there is no such file.
//! - `spec`: the file itself.

mod edits;
mod nodes;
mod nvidia;
mod spec;

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use clap::{Args, ValueHint};

use super::preload::library;
use super::{CtlError, Target, block_on};
use nvidia::Nvidia;
use spec::{FromHost, Spec};

/// Where runtimes look for what an administrator has written.
const DEFAULT_OUTPUT: &str = "/etc/cdi/nvshare.json";

#[derive(Debug, Args)]
pub struct Generate {
    /// The file to write, or - for standard output
    #[arg(long, value_name = "FILE", default_value = DEFAULT_OUTPUT, value_hint = ValueHint::FilePath)]
    output: PathBuf,
    /// The library on this host [default: the one that is installed with nvsharectl]
    #[arg(long, value_name = "PATH")]
    library: Option<PathBuf>,
    /// What becomes /etc/ld.so.preload in containers: a file on this host that names the library as it is found there
    #[arg(long, value_name = "PATH", default_value = spec::PRELOAD_LIST)]
    preload_list: PathBuf,
    /// The directory of the socket where programs connect
    #[arg(long, value_name = "DIRECTORY", default_value = spec::SOCKET_DIRECTORY, value_hint = ValueHint::DirPath)]
    sockets: PathBuf,
    /// NVIDIA's CDI file [default: the one in /etc/cdi or /var/run/cdi, if there is one]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    nvidia: Option<PathBuf>,
}

/// Writes the file, and returns what there is to say about it.
pub fn generate(target: &Target, asked: &Generate) -> Result<Vec<String>, CtlError> {
    let gpus = block_on(async { Ok(target.connect().await?.list_gpus().await?) })?;
    if gpus.is_empty() {
        return Err(CtlError::Failed(
            "the scheduler knows no GPU: if the driver was loaded after it started, restart it; without NVML it knows a \
             GPU once a program has used it"
                .into(),
        ));
    }
    let library = library::find(asked.library.as_deref())?;
    let from_host = FromHost {
        library: existing(&library, "library")?,
        preload_list: existing(&asked.preload_list, "preload-list")?,
        sockets: existing(&asked.sockets, "sockets")?,
    };
    let nvidia = match &asked.nvidia {
        Some(file) => Some(Nvidia::read(file).map_err(CtlError::Failed)?),
        None => Nvidia::find().map_err(CtlError::Failed)?,
    };
    let mut remarks = Vec::new();
    let spec = Spec::of(&gpus, &from_host, nvidia.as_ref(), &mut remarks).map_err(CtlError::Failed)?;
    let text = format!("{:#}\n", spec.json());
    if asked.output == Path::new("-") {
        print!("{text}");
    } else {
        write(&asked.output, &text)
            .map_err(|e| CtlError::Failed(format!("cannot write {}: {e}", asked.output.display())))?;
        remarks.push(format!("{}: {}", asked.output.display(), spec.names()));
    }
    Ok(remarks)
}

/// What runtimes are to mount has to be there, by a path that means the same to them.
fn existing(path: &Path, option: &str) -> Result<String, CtlError> {
    let fail = |why: String| CtlError::Failed(format!("--{option} {}: {why}", path.display()));
    let whole = std::path::absolute(path).map_err(|e| fail(e.to_string()))?;
    whole.metadata().map_err(|e| fail(e.to_string()))?;
    let text = whole.into_os_string().into_string();
    text.map_err(|_| fail("its path is no text, and cannot be written in a CDI file".into()))
}

/// In one step: runtimes read it at any time.
fn write(path: &Path, text: &str) -> std::io::Result<()> {
    let path = std::path::absolute(path)?;
    let directory = path.parent().unwrap_or(Path::new("/"));
    std::fs::create_dir_all(directory)?;
    // Runtimes read every .json here, and no other name.
    let mut file = tempfile::Builder::new().prefix(".nvshare-").suffix(".new").tempfile_in(directory)?;
    file.write_all(text.as_bytes())?;
    file.as_file().set_permissions(std::fs::Permissions::from_mode(0o644))?;
    file.as_file().sync_all()?;
    file.persist(&path)?;
    Ok(())
}
