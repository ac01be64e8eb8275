//! Enumerations that travel as one byte, each code written out, an unknown code refused.

/// A byte that stands for nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no {what} has the code {code}")]
pub struct UnknownCode {
    /// The enumeration.
    pub what: &'static str,
    /// The byte.
    pub code: u8,
}

/// Declares an enumeration with its codes and the names it goes by in text.
macro_rules! wire_enum {
    (
        $(#[$doc:meta])*
        pub enum $name:ident {
            $($(#[$variant_doc:meta])* $variant:ident = $code:literal => $text:literal,)+
        }
    ) => {
        $(#[$doc])*
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash,
            serde::Serialize, serde::Deserialize,
        )]
        #[serde(try_from = "u8", into = "u8")]
        #[repr(u8)]
        pub enum $name {
            $($(#[$variant_doc])* $variant = $code,)+
        }

        impl $name {
            /// Every value there is, in the order of the codes.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// The byte that stands for it on the wire.
            #[must_use]
            pub const fn code(self) -> u8 {
                self as u8
            }
        }

        impl From<$name> for u8 {
            fn from(value: $name) -> u8 {
                value.code()
            }
        }

        impl TryFrom<u8> for $name {
            type Error = $crate::codes::UnknownCode;
            fn try_from(code: u8) -> Result<Self, $crate::codes::UnknownCode> {
                match code {
                    $($code => Ok(Self::$variant),)+
                    _ => Err($crate::codes::UnknownCode { what: stringify!($name), code }),
                }
            }
        }

        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.pad(match self {
                    $(Self::$variant => $text,)+
                })
            }
        }
    };
}
