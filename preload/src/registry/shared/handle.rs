//! The handles of exported memory. Like the handles of `cuIpcGetMemHandle`, they have 64 bytes and name
//! an allocation.

use nvshare_wire::Secret;

/// `CUipcMemHandle`.
pub type IpcHandle = [u8; 64];

/// The first bytes of this library's handles. The driver's handles begin with an address, which cannot
/// have this value.
const MAGIC: [u8; 8] = *b"nvshare\xfe";

#[derive(Debug, Clone, Copy)]
pub struct ExportHandle {
    pub exporter: Secret,
    pub secret: Secret,
    /// The allocation: its size, its id, and its offset in the range.
    pub size: u64,
    pub id: u64,
    pub range: u32,
    pub offset: u32,
}

/// Identifies a range of another process by the exporter's key and the number of the range there.
pub type RangeId = (Secret, u32);

pub fn is_ours(handle: &IpcHandle) -> bool {
    handle.starts_with(&MAGIC)
}

impl ExportHandle {
    pub fn write(&self) -> IpcHandle {
        let mut handle = [0; 64];
        let parts: [&[u8]; 7] = [
            &MAGIC,
            &self.exporter.0,
            &self.secret.0,
            &self.size.to_le_bytes(),
            &self.id.to_le_bytes(),
            &self.range.to_le_bytes(),
            &self.offset.to_le_bytes(),
        ];
        for (to, from) in handle.iter_mut().zip(parts.into_iter().flatten()) {
            *to = *from;
        }
        handle
    }

    pub fn read(handle: &IpcHandle) -> Option<Self> {
        let (_, rest) = handle.split_first_chunk::<8>()?;
        let (exporter, rest) = rest.split_first_chunk()?;
        let (secret, rest) = rest.split_first_chunk()?;
        let (size, rest) = rest.split_first_chunk()?;
        let (id, rest) = rest.split_first_chunk()?;
        let (range, rest) = rest.split_first_chunk()?;
        let (offset, _) = rest.split_first_chunk()?;
        Some(Self {
            exporter: Secret(*exporter),
            secret: Secret(*secret),
            size: u64::from_le_bytes(*size),
            id: u64::from_le_bytes(*id),
            range: u32::from_le_bytes(*range),
            offset: u32::from_le_bytes(*offset),
        })
    }

    pub fn range_id(&self) -> RangeId {
        (self.exporter, self.range)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_export_handle_round_trips() {
        let (exporter, secret) = (Secret([1; 16]), Secret([2; 16]));
        let handle = ExportHandle { exporter, secret, size: 3 << 40, id: 4, range: 5, offset: 6 };
        let bytes = handle.write();
        assert!(is_ours(&bytes) && !is_ours(&[0; 64]));
        let read = ExportHandle::read(&bytes).expect("64 bytes");
        assert_eq!((read.exporter, read.secret, read.size, read.id), (exporter, secret, 3 << 40, 4));
        assert_eq!((read.range, read.offset), (5, 6));
    }
}
