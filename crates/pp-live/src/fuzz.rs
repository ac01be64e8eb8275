//! Any request, for the target in `fuzz/` and a short pass in the tests.

use hyper::Request;
use hyper::header::HOST;

use crate::access::{Access, Route};
use crate::token::Token;

/// A request of any bytes: the first line is the target, each other one a header. Nothing but the token opens a route, and
/// nothing opens one without a host.
pub fn request(bytes: &[u8]) {
    let token = Token::of_test();
    for address in ["127.0.0.1:80", "[::]:80", "192.0.2.7:80"] {
        let mut lines = bytes.split(|byte| *byte == b'\n');
        let mut request = Request::get(lines.next().unwrap_or_default());
        for line in lines {
            let colon = line.iter().position(|byte| *byte == b':');
            let (name, value) = line.split_at(colon.unwrap_or(0));
            request = request.header(name, value.get(1..).unwrap_or_default());
        }
        // What is no request never comes here: hyper refuses it.
        let Ok(request) = request.body(()) else {
            return;
        };
        let (request, ()) = request.into_parts();
        match Access::of_test(address, Some("machine")).judge(&request) {
            Ok(route) => {
                let has_token = bytes.windows(16).any(|window| token.is(window));
                assert!(has_token || route == Route::Health);
                assert_eq!(request.headers.get_all(HOST).iter().count(), 1);
            }
            Err(status) => assert!(status.is_client_error()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn seeds_that_are_cut_and_changed_anywhere_hold_the_guarantees() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/request");
        let mut seeds = 0;
        for entry in std::fs::read_dir(folder).unwrap() {
            let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
            let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
            let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16);
            let seed: Vec<u8> = digits.chunks(2).map(|pair| byte(pair).unwrap()).collect();
            for at in 0..seed.len() {
                request(&seed[..at]);
                for other in [0, b'\n', b':', b'[', b'@', b'%', 0xff, seed[at] ^ 0x20] {
                    let mut changed = seed.clone();
                    changed[at] = other;
                    request(&changed);
                }
            }
            request(&seed);
            seeds += 1;
        }
        assert!(seeds >= 2);
    }
}
