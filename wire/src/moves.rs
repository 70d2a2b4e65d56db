//! Moves of a client between GPUs.

use crate::{
    Uuid, WireError,
    codec::{Field, Packet, Reader},
};

/// The maximum number of moves in one message. The packet length limits this number.
pub const MAX_MOVES: usize = 7;

/// Pairs of the old and the new UUID of each GPU whose work and memory have moved to another GPU.
/// Padded with nil UUIDs.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Moves([(Uuid, Uuid); MAX_MOVES]);

impl Moves {
    /// Returns `None` for more than [`MAX_MOVES`] moves.
    pub fn new(moves: impl IntoIterator<Item = (Uuid, Uuid)>) -> Option<Self> {
        let mut all = Self::default();
        for (at, pair) in moves.into_iter().enumerate() {
            *all.0.get_mut(at)? = pair;
        }
        Some(all)
    }

    /// The moves. The peer's values are not checked, so a GPU may occur twice.
    pub fn iter(&self) -> impl Iterator<Item = (Uuid, Uuid)> {
        self.0.iter().copied().take_while(|(before, _)| *before != Uuid::default())
    }

    pub fn is_empty(&self) -> bool {
        self.iter().next().is_none()
    }

    /// The new UUID of the GPU that had the UUID `before`; `before` itself if the GPU has not
    /// moved.
    pub fn now(&self, before: Uuid) -> Uuid {
        self.iter().find(|(from, _)| *from == before).map_or(before, |(_, to)| to)
    }
}

impl core::fmt::Debug for Moves {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

impl Field for Moves {
    fn put(&self, packet: &mut Packet) {
        self.0.iter().for_each(|(before, now)| {
            before.put(packet);
            now.put(packet);
        });
    }

    fn get(reader: &mut Reader<'_>, field: &'static str) -> Result<Self, WireError> {
        let mut moves = Self::default();
        for (before, now) in &mut moves.0 {
            (*before, *now) = (Uuid::get(reader, field)?, Uuid::get(reader, field)?);
        }
        Ok(moves)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unmoved_gpu_keeps_its_uuid() {
        let [a, b, c] = [1, 2, 3].map(|n| Uuid([n; 16]));
        let moves = Moves::new([(a, b), (b, a)]).unwrap();
        assert_eq!([a, b, c].map(|gpu| moves.now(gpu)), [b, a, c]);
        assert!(!moves.is_empty() && Moves::default().is_empty());
    }

    #[test]
    fn excess_moves_are_rejected() {
        let moves = |n: u8| Moves::new((1..=n).map(|n| (Uuid([n; 16]), Uuid([n + 1; 16]))));
        assert_eq!(moves(MAX_MOVES as u8).unwrap().iter().count(), MAX_MOVES);
        assert_eq!(moves(MAX_MOVES as u8 + 1), None);
    }
}
