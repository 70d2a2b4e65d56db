//! [`Host`]: what the daemon manages for programs and users beside the scheduler's decisions. Its
//! components do not change each other. `SwapFiles` reads the figures of host memory.

use super::foreign::ForeignCheckpoints;
use super::host_use::HostFigures;
use super::moves::Moves;
use super::placement::Placements;
use super::rooms::Rooms;
use super::sharing::Sharing;
use super::sleep::Sleep;
use super::swap_files::SwapFiles;

#[derive(Debug, Default)]
pub struct Host {
    pub figures: HostFigures,
    pub files: SwapFiles,
    pub sharing: Sharing,
    pub placements: Placements,
    pub sleep: Sleep,
    pub foreign: ForeignCheckpoints,
    pub moves: Moves,
    /// Memory that is kept free at users' requests.
    pub rooms: Rooms,
}
