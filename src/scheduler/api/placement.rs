//! Placement: the choice of GPUs for programs that do not choose their own.

use super::GpuId;

/// How a GPU is chosen for programs that do not choose one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Placement {
    /// Programs see all GPUs. If a program requests a placement nevertheless, it is placed as with
    /// [`Self::Spread`].
    #[default]
    None,
    /// Chooses the GPU with the least sufficient room, so that other GPUs stay free for programs
    /// that need a whole GPU.
    Pack,
    /// Chooses the GPU with the fewest programs.
    Spread,
}

/// Labels that rules assign to a program to restrict its neighbours on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Labels {
    /// All programs with the same label run on one GPU.
    pub affinity: Option<String>,
    /// Programs with the same label run on different GPUs.
    pub anti_affinity: Option<String>,
    /// Programs share a GPU only if all of them have the same label, or none has a label.
    pub exclusion: Option<String>,
}

/// A request for placement.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct PlacementRequest {
    /// GPUs that the program may use. Among equally good GPUs, the first is chosen.
    pub candidates: Vec<GpuId>,
    /// The number of GPUs; 0 counts as 1.
    pub count: u32,
    /// Bytes that the program needs on each GPU, excluding its context. `None`: unknown.
    pub bytes: Option<u64>,
    /// The placement is for a program that this process is about to `exec` or to start.
    pub ahead: bool,
}

/// Why a program cannot be placed.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PlacementError {
    /// There are fewer candidates than requested GPUs.
    TooFew { wanted: u32, there: u32 },
    /// Programs with this affinity are on other GPUs.
    Affinity(String),
    /// Programs with this anti-affinity are on all candidates.
    AntiAffinity(String),
    /// Every candidate already runs a program that this exclusion separates from the client.
    Exclusion(String),
}
