//! The races that safe code cannot write: each of these programs must not compile.

#[test]
fn misuse_of_buffers_in_flight_does_not_compile() {
    let cases = trybuild::TestCases::new();
    cases.compile_fail("tests/compile_fail/*.rs");
}
