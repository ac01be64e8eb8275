//! The token that a viewer must know.

use std::fmt;
use std::hint::black_box;
use std::path::Path;

use pp_job::Error;
use pp_transport::launch::{random_text, read_secret};

/// What a viewer shows to be let in. `Debug` shows none of it.
#[derive(Clone)]
pub(crate) struct Token(String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

impl Token {
    /// A fresh one from the system's random numbers.
    pub(crate) fn random() -> Self {
        Self(random_text())
    }

    /// The one in a file, as the secret of a job is read.
    pub(crate) fn read(file: &Path) -> Result<Self, Error> {
        let bytes = read_secret("--live-token-file", file);
        let bytes = bytes.map_err(|error| Error::Usage(error.to_string()))?;
        // It stands in a URL and in a header as it is.
        let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._~".contains(byte);
        let text = String::from_utf8(bytes).ok();
        let plain = text.filter(|text| text.as_bytes().iter().all(is_plain));
        plain.map(Self).ok_or_else(|| {
            Error::Usage(format!(
                "--live-token-file {}: a token has letters, digits and - . _ ~ alone; make one with: openssl rand -hex 32",
                file.display()
            ))
        })
    }

    /// Says whether it was given, in a time that does not depend on which byte differs.
    pub(crate) fn is(&self, given: &[u8]) -> bool {
        let own = self.0.as_bytes();
        let differ = |all: u8, (a, b): (&u8, &u8)| black_box(all | (a ^ b));
        own.len() == given.len() && own.iter().zip(given).fold(0, differ) == 0
    }

    /// One that tests know.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn of_test() -> Self {
        Self("0123456789abcdef".into())
    }

    /// As it stands in a URL.
    pub(crate) fn as_text(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn one_byte_or_the_length_makes_another_token_and_no_text_shows_it() {
        let token = Token::random();
        let text = token.as_text().to_owned();
        assert!(token.is(text.as_bytes()) && text.len() == 64);
        assert!(!token.is(b"") && !token.is(&text.as_bytes()[1..]));
        for at in [0, 31, 63] {
            let mut other = text.clone().into_bytes();
            other[at] ^= 1;
            assert!(!token.is(&other));
        }
        assert!(!format!("{token:?}").contains(&text));
        assert!(!Token::random().is(text.as_bytes()));
    }

    #[test]
    fn a_file_holds_one_plain_token_and_is_closed_to_others() {
        let path = std::env::temp_dir().join(format!("pp-live-token-{}", std::process::id()));
        let read = |text: &str, mode: u32| {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            Token::read(&path).map_err(|error| error.to_string())
        };
        assert!(
            read("0123456789abcdef\n", 0o600)
                .unwrap()
                .is(b"0123456789abcdef")
        );
        for (text, mode, words) in [
            ("0123456789abcdef", 0o644, "open to every user"),
            ("0123456789 abcdef", 0o600, "letters, digits"),
            ("short", 0o600, "holds 5 bytes"),
        ] {
            let refused = read(text, mode).unwrap_err();
            assert!(refused.contains(words), "{refused}");
        }
        std::fs::remove_file(&path).unwrap();
    }
}
