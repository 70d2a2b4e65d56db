//! Macros that declare messages. Each message has a number, a name and fields.

/// Declares one direction's messages as an enum with `encode(version)` and `decode(packet, version)`.
///
/// Kinds marked `handshake` have version 0 in their header and a layout that never changes, because
/// they are exchanged before the two sides have agreed on a version. `(since 2)` after a kind or
/// before a field names the version that added it. On an older connection, such a kind is unknown,
/// and such a field is omitted and read as its default.
macro_rules! messages {
    (
        $(#[$meta:meta])* pub enum $name:ident { $(
            $(#[$doc:meta])*
            $kind:literal $(($handshake:ident $($since:literal)?))? => $variant:ident {
                $( $(#[$fdoc:meta])* $((since $fsince:literal))? $field:ident: $type:ty ),* $(,)?
            }
        ),* $(,)? }
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name { $( $(#[$doc])* $variant { $( $(#[$fdoc])* $field: $type ),* } ),* }

        impl $name {
            /// Encodes this message as a packet for a connection of that protocol version.
            pub fn encode(&self, version: u16) -> $crate::codec::Packet {
                use $crate::codec::Field;
                match self { $(
                    Self::$variant { $($field),* } => {
                        let version = messages!(@version version $($handshake $($since)?)?);
                        #[allow(unused_mut)] // for messages without fields
                        let mut packet = $crate::codec::Packet::new($crate::header::Header { version, kind: $kind });
                        $( if messages!(@has version $($fsince)?) { $field.put(&mut packet); } )*
                        packet.finish()
                    }
                )* }
            }

            /// Reads a packet from a connection of that protocol version. Never panics.
            pub fn decode(packet: &[u8], version: u16) -> Result<Self, $crate::WireError> {
                use $crate::codec::Field;
                let (header, mut reader) = $crate::header::Header::read(packet)?;
                match header.kind {
                    $( $kind if messages!(@known version $($handshake $($since)?)?) => {
                        let expected = messages!(@version version $($handshake $($since)?)?);
                        if header.version != expected {
                            return Err($crate::WireError::Version { got: header.version, expected });
                        }
                        $( let $field = messages!(@get $type, reader, stringify!($field), version $($fsince)?); )*
                        reader.finish()?;
                        Ok(Self::$variant { $($field),* })
                    } )*
                    kind => Err($crate::WireError::Kind { kind }),
                }
            }
        }
    };
    (@version $version:ident handshake) => { 0 };
    (@version $version:ident $(since $since:literal)?) => { $version };
    (@known $version:ident since $since:literal) => { $version >= $since };
    (@known $version:ident $($handshake:ident)?) => { true };
    (@get $type:ty, $reader:ident, $name:expr, $version:ident) => { <$type>::get(&mut $reader, $name)? };
    (@get $type:ty, $reader:ident, $name:expr, $version:ident $since:literal) => {
        if $version >= $since { <$type>::get(&mut $reader, $name)? } else { <$type>::default() }
    };
    (@has $version:ident) => { true };
    (@has $version:ident $since:literal) => { $version >= $since };
}

/// Declares an enum that is encoded as one byte. Decoding any other byte returns an error that
/// names the field.
macro_rules! byte_enum {
    ($(#[$meta:meta])* pub enum $name:ident { $( $(#[$doc:meta])* $variant:ident = $value:literal ),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
        #[repr(u8)]
        pub enum $name { $( $(#[$doc])* $variant = $value ),* }

        impl $crate::codec::Field for $name {
            fn put(&self, packet: &mut $crate::codec::Packet) {
                packet.put(&[*self as u8]);
            }
            fn get(reader: &mut $crate::codec::Reader<'_>, field: &'static str) -> Result<Self, $crate::WireError> {
                match u8::get(reader, field)? {
                    $( $value => Ok(Self::$variant), )*
                    value => Err($crate::WireError::Value { field, value: value.into() }),
                }
            }
        }
    };
}

pub(crate) use {byte_enum, messages};

#[cfg(test)]
mod tests {
    use crate::WireError;

    messages! {
        /// Messages of a protocol with a version 2.
        pub enum Example {
            1 (handshake) => Greeting { number: u16 },
            2 => Old { slot: u32, (since 2) bytes: u64 },
            3 (since 2) => New { slot: u32 },
        }
    }

    /// An older peer receives no newer fields and no newer messages, and cannot send them.
    #[test]
    fn version_1_lacks_the_additions_of_version_2() {
        let old = |bytes| Example::Old { slot: 1, bytes };
        assert_eq!(Example::decode(old(7).encode(1).as_bytes(), 1), Ok(old(0)));
        assert_eq!(Example::decode(old(7).encode(2).as_bytes(), 2), Ok(old(7)));
        let new = Example::New { slot: 1 };
        assert_eq!(Example::decode(new.encode(2).as_bytes(), 2), Ok(new));
        assert_eq!(Example::decode(new.encode(1).as_bytes(), 1), Err(WireError::Kind { kind: 3 }));
        let packet = old(7).encode(2);
        assert_eq!(Example::decode(packet.as_bytes(), 1), Err(WireError::Version { got: 2, expected: 1 }));
    }

    #[test]
    fn handshakes_have_one_layout_in_all_versions() {
        let greeting = Example::Greeting { number: 5 };
        assert_eq!(greeting.encode(1).as_bytes(), greeting.encode(2).as_bytes());
        assert_eq!(Example::decode(greeting.encode(1).as_bytes(), 2), Ok(greeting));
    }
}
