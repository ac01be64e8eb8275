//! Who is let in, and to what.
//!
//! Hazard: a page of another site that makes a browser call this address under a name of its own (DNS rebinding), a stranger
//! who guesses, a proxy that is made of this server. Guarantee: a [`Route`] is given only to a GET without a body, for a host
//! that is this one, with the token; [`Route::Health`], which tells nothing, needs none.

use std::net::{IpAddr, SocketAddr};

use hyper::header::{AUTHORIZATION, CONTENT_LENGTH, HOST, TRANSFER_ENCODING};
use hyper::http::request::Parts;
use hyper::{Method, StatusCode};
use pp_job::command_line::host_name;

use crate::token::Token;

/// What can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    /// The page for a browser.
    Page,
    /// What the page shows.
    Snapshot,
    /// The same, a second later, or as soon as the job ends.
    Next,
    /// The report so far.
    Report,
    /// For Prometheus.
    Metrics,
    /// A frame before the pipeline.
    Before,
    /// A frame behind it.
    After,
    /// Whether somebody answers.
    Health,
}

impl Route {
    fn of(path: &str) -> Option<Self> {
        Some(match path {
            "/" => Self::Page,
            "/snapshot.json" => Self::Snapshot,
            "/next.json" => Self::Next,
            "/report.json" => Self::Report,
            "/metrics" => Self::Metrics,
            "/thumb/before" => Self::Before,
            "/thumb/after" => Self::After,
            "/healthz" => Self::Health,
            _ => return None,
        })
    }
}

/// Whom this server lets in.
#[derive(Debug)]
pub(crate) struct Access {
    token: Token,
    address: IpAddr,
    /// The name of this machine, where others may call it.
    name: Option<String>,
}

impl Access {
    pub(crate) fn new(token: Token, address: SocketAddr) -> Self {
        let address = address.ip();
        let is_local = address.is_loopback();
        Self {
            token,
            address,
            name: (!is_local).then(|| host_name().to_ascii_lowercase()),
        }
    }

    /// That of tests: a known token, and a machine of this name.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn of_test(address: &str, name: Option<&str>) -> Self {
        Self {
            name: name.map(String::from),
            ..Self::new(Token::of_test(), address.parse().expect("an address"))
        }
    }

    /// What this request is answered with, or why it is refused.
    pub(crate) fn judge(&self, request: &Parts) -> Result<Route, StatusCode> {
        if request.method != Method::GET {
            return Err(StatusCode::METHOD_NOT_ALLOWED);
        }
        let mut hosts = request.headers.get_all(HOST).iter();
        let (Some(host), None) = (hosts.next(), hosts.next()) else {
            return Err(StatusCode::BAD_REQUEST);
        };
        // Only a proxy is asked for a whole URL.
        if request.uri.authority().is_some() {
            return Err(StatusCode::BAD_REQUEST);
        }
        if !host.to_str().is_ok_and(|host| self.is_here(host)) {
            return Err(StatusCode::MISDIRECTED_REQUEST);
        }
        let length = request.headers.get(CONTENT_LENGTH);
        if request.headers.contains_key(TRANSFER_ENCODING)
            || length.is_some_and(|length| length != "0")
        {
            return Err(StatusCode::PAYLOAD_TOO_LARGE);
        }
        let route = Route::of(request.uri.path());
        if route != Some(Route::Health) && !self.knows_token(request, route) {
            return Err(StatusCode::UNAUTHORIZED);
        }
        route.ok_or(StatusCode::NOT_FOUND)
    }

    /// Says whether a `Host` names this server: whatever the port is, since it may be forwarded.
    fn is_here(&self, host: &str) -> bool {
        let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
        let name = match host.rsplit_once(':') {
            Some((name, port)) if is_port(port) => name,
            _ => host,
        };
        let literal = match name.strip_prefix('[') {
            Some(rest) => rest
                .strip_suffix(']')
                .and_then(|v6| Some(IpAddr::V6(v6.parse().ok()?))),
            None => name.parse().ok().map(IpAddr::V4),
        };
        match literal {
            // No name leads there, so no name can be made to.
            Some(ip) => ip.is_loopback() || ip == self.address || self.address.is_unspecified(),
            None => {
                let name = name.to_ascii_lowercase();
                name == "localhost" || self.name.as_ref() == Some(&name)
            }
        }
    }

    /// The page takes the token from its URL, since a browser is given no header; everything else from `Authorization` alone,
    /// where no log and no history has it.
    fn knows_token(&self, request: &Parts, route: Option<Route>) -> bool {
        let mut given = request.headers.get_all(AUTHORIZATION).iter();
        if let (Some(given), None) = (given.next(), given.next()) {
            let (scheme, token) = given.as_bytes().split_at(given.len().min(7));
            return scheme.eq_ignore_ascii_case(b"bearer ") && self.token.is(token);
        }
        let query = request.uri.query().filter(|_| route == Some(Route::Page));
        let mut pairs = query.unwrap_or_default().split('&');
        let token = pairs.find_map(|pair| pair.strip_prefix("token="));
        token.is_some_and(|token| self.token.is(token.as_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(address: &str, script: &str) -> Result<Route, StatusCode> {
        let name = Some("machine").filter(|_| !address.starts_with("127"));
        let access = Access::of_test(address, name);
        let (line, headers) = script.split_once('\n').unwrap_or((script, ""));
        let (method, target) = line.split_once(' ').unwrap();
        let mut request = hyper::Request::builder().method(method).uri(target);
        for header in headers.lines() {
            let (name, value) = header.split_once(": ").unwrap();
            request = request.header(name, value);
        }
        access.judge(&request.body(()).unwrap().into_parts().0)
    }

    const HERE: &str = "127.0.0.1:8000";
    const BEARER: &str = "Host: localhost\nAuthorization: Bearer 0123456789abcdef";

    #[test]
    fn the_token_opens_and_the_page_alone_takes_it_from_its_url() {
        for (target, route) in [
            ("/", Route::Page),
            ("/snapshot.json", Route::Snapshot),
            ("/next.json", Route::Next),
            ("/report.json", Route::Report),
            ("/metrics", Route::Metrics),
            ("/thumb/before", Route::Before),
            ("/thumb/after", Route::After),
        ] {
            assert_eq!(judge(HERE, &format!("GET {target}\n{BEARER}")), Ok(route));
            let in_url = format!("GET {target}?a=b&token=0123456789abcdef\nHost: localhost:8000");
            let expected = match route {
                Route::Page => Ok(route),
                _ => Err(StatusCode::UNAUTHORIZED),
            };
            assert_eq!(judge(HERE, &in_url), expected, "{target}");
            for wrong in [
                "",
                "\nAuthorization: Bearer 0123456789abcdeF",
                "\nAuthorization: Basic 0123456789abcdef",
            ] {
                let script = format!("GET {target}?token=0123456789abcdeF\nHost: localhost{wrong}");
                assert_eq!(judge(HERE, &script), Err(StatusCode::UNAUTHORIZED));
            }
        }
        assert_eq!(
            judge(HERE, "GET /healthz\nHost: [::1]:8000"),
            Ok(Route::Health)
        );
        assert_eq!(
            judge(HERE, "GET /else\nHost: localhost"),
            Err(StatusCode::UNAUTHORIZED)
        );
        assert_eq!(
            judge(HERE, &format!("GET /else\n{BEARER}")),
            Err(StatusCode::NOT_FOUND)
        );
    }

    #[test]
    fn a_host_that_is_not_this_one_is_refused_with_and_without_the_token() {
        let host = |address: &str, host: &str| {
            judge(
                address,
                &format!("GET /\nHost: {host}\nAuthorization: Bearer 0123456789abcdef"),
            )
            .is_ok()
        };
        for good in [
            "localhost",
            "LOCALHOST:1",
            "127.0.0.1",
            "127.0.0.1:8000",
            "[::1]",
            "[::1]:8000",
        ] {
            for address in [HERE, "0.0.0.0:8000", "192.0.2.7:8000"] {
                assert!(host(address, good), "{good} at {address}");
            }
        }
        for bad in [
            "evil.example",
            "localhost.evil.example",
            "192.0.2.7",
            "machine",
            "",
            "[::1",
            "127.0.0.1.evil:80",
        ] {
            assert!(!host(HERE, bad), "{bad}");
        }
        assert!(host("192.0.2.7:80", "192.0.2.7:80") && !host("192.0.2.7:80", "192.0.2.8"));
        assert!(host("[::]:80", "192.0.2.7") && host("[::]:80", "[2001:db8::1]:80"));
        assert!(host("0.0.0.0:80", "Machine:80") && !host("0.0.0.0:80", "machine.evil.example"));
        assert_eq!(
            judge(HERE, "GET /healthz\nHost: evil.example"),
            Err(StatusCode::MISDIRECTED_REQUEST)
        );
    }

    #[test]
    fn only_a_get_for_a_path_without_a_body_is_taken() {
        for method in ["POST", "HEAD", "PUT", "OPTIONS", "CONNECT", "FOO"] {
            let target = if method == "CONNECT" {
                "localhost:80"
            } else {
                "/"
            };
            let judged = judge(HERE, &format!("{method} {target}\n{BEARER}"));
            assert_eq!(judged, Err(StatusCode::METHOD_NOT_ALLOWED), "{method}");
        }
        for (script, status) in [
            ("GET http://localhost/", StatusCode::BAD_REQUEST),
            ("GET /\nHost: localhost", StatusCode::BAD_REQUEST),
            ("GET /\nContent-Length: 5", StatusCode::PAYLOAD_TOO_LARGE),
            (
                "GET /\nTransfer-Encoding: chunked",
                StatusCode::PAYLOAD_TOO_LARGE,
            ),
        ] {
            assert_eq!(
                judge(HERE, &format!("{script}\n{BEARER}")),
                Err(status),
                "{script}"
            );
        }
        assert_eq!(judge(HERE, "GET /healthz"), Err(StatusCode::BAD_REQUEST));
        assert!(judge(HERE, &format!("GET /\n{BEARER}\nContent-Length: 0")).is_ok());
    }
}
