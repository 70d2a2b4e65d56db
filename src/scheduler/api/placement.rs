//! Placement of programs that choose no GPU.

use super::GpuId;

/// How a GPU is chosen for programs that choose none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Placement {
    /// Programs see all GPUs. A program that asks for a placement nevertheless gets one as with [`Self::Spread`].
    #[default]
    None,
    /// The GPU with the least room that suffices, so that others stay free for programs that need a whole GPU.
    Pack,
    /// The GPU with the fewest programs.
    Spread,
}

/// Labels that rules give to a program, and that restrict its neighbours on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Labels {
    /// All programs with the same label run on one GPU.
    pub affinity: Option<String>,
    /// Programs with the same label run on different GPUs.
    pub anti_affinity: Option<String>,
    /// Only programs with the same label, or only programs without one, share a GPU.
    pub exclusion: Option<String>,
}

/// A request for placement.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct PlacementRequest {
    /// GPUs that the program may use. Of equally good ones, the first is taken.
    pub candidates: Vec<GpuId>,
    /// The number of GPUs; 0 counts as 1.
    pub count: u32,
    /// Bytes that the program needs on each GPU, without its context. `None`: unknown.
    pub bytes: Option<u64>,
    /// The placement is for the program that this process is about to become or to start.
    pub ahead: bool,
}

/// Why a program cannot be placed.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PlacementError {
    /// There are fewer candidates than GPUs wanted.
    TooFew { wanted: u32, there: u32 },
    /// Programs with this affinity are on other GPUs.
    Affinity(String),
    /// Programs with this anti-affinity are on all candidates.
    AntiAffinity(String),
    /// On each candidate is a program that this exclusion keeps apart from the client.
    Exclusion(String),
}
