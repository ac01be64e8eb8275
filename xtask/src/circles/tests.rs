use super::*;

/// What the files of a crate use of each other. The first is its root.
fn uses_of(files: &[(&str, &str)]) -> Uses {
    let read = |wanted: &str| {
        let found = files.iter().find(|(file, _)| *file == wanted);
        found.map(|(_, text)| (*text).to_owned())
    };
    Tree::read(files[0].0, &read).unwrap().uses()
}

/// The shortest circle of a crate.
fn circle(files: &[(&str, &str)]) -> Option<String> {
    let uses = uses_of(files);
    shortest_circle(&uses).map(|circle| in_words(&uses, &circle))
}

#[test]
fn a_circle_of_two_is_named_with_the_lines() {
    let found = circle(&[
        ("src/lib.rs", "mod a;\npub mod b;"),
        (
            "src/a.rs",
            "//! A.\n\nuse crate::b::{self, B};\npub struct A(b::B, B);",
        ),
        (
            "src/b/mod.rs",
            "pub struct B;\nfn f() { vec![crate::a::A::new()]; }",
        ),
    ]);
    let words = "a circle of 2 files:\n  src/a.rs:3 uses crate::b::B of src/b/mod.rs\n  \
                 src/b/mod.rs:2 uses crate::a::A::new of src/a.rs";
    assert_eq!(found.as_deref(), Some(words));
}

#[test]
fn the_shortest_of_two_circles_is_named() {
    let files = [
        ("src/main.rs", "mod a; mod b; mod c; fn main() { a::f(); }"),
        ("src/a.rs", "pub fn f() { super::b::f() }"),
        ("src/b.rs", "use super::c::f as next; pub fn f() { next() }"),
        ("src/c.rs", "pub fn f() { crate::a::f() }"),
    ];
    assert!(circle(&files).unwrap().starts_with("a circle of 3 files:"));
    let mut files = files;
    files[3].1 = "pub fn f() { crate::a::f(); super::b::f() }";
    let found = circle(&files).unwrap();
    assert!(found.starts_with("a circle of 2 files:") && !found.contains("src/a.rs"));
}

#[test]
fn a_parent_that_uses_its_child_must_not_be_used_by_it() {
    let lib = ("src/lib.rs", "mod a;");
    let child = ("src/a/b.rs", "use super::Size; pub struct B(Size);");
    let uses = ("src/a.rs", "mod b; pub struct Size; fn f(b: b::B) {}");
    let re_exports = ("src/a.rs", "mod b; pub use b::B; pub struct Size;");
    let both = (
        "src/a.rs",
        "mod b; pub use b::B; pub struct Size; fn f(b: B) {}",
    );
    assert!(circle(&[lib, uses, child]).is_some());
    assert_eq!(circle(&[lib, re_exports, child]), None);
    assert!(circle(&[lib, both, child]).is_some());
}

#[test]
fn a_re_export_stands_for_the_file_behind_it() {
    let through = |used: &'static str| {
        circle(&[
            ("src/lib.rs", "mod a; mod other;"),
            ("src/a/mod.rs", "mod b; mod c; pub use b::*; pub use c::C;"),
            ("src/a/b.rs", "use crate::other::O; pub struct B(O);"),
            ("src/a/c.rs", "pub struct C;"),
            ("src/other.rs", used),
        ])
    };
    assert_eq!(through("use crate::a::C; pub struct O(C);"), None);
    assert!(through("use crate::a::B; pub struct O(Box<B>);").is_some());
}

#[test]
fn tests_comments_and_other_crates_do_not_count() {
    let found = circle(&[
        (
            "src/lib.rs",
            "mod a; mod b; #[cfg(all(test, unix))] mod models; #[cfg(loom)] mod b { }",
        ),
        (
            "src/a.rs",
            "/// As [`crate::b::B`].\n#[cfg(test)]\nimpl<S, T> From<crate::b::B> for Vec<(S, T)> { }\n\
             struct A { #[cfg(test)] b: Vec<crate::b::B>, pub c: u8 }\n#[cfg(test)] use crate::b::{B};\n\
             #[cfg(test)] mod tests { use crate::b::B; }",
        ),
        ("src/b.rs", "use crate::a::A; use a::B; pub struct B(A);"),
    ]);
    assert_eq!(found, None);
    let with_feature = "#[cfg(any(test, feature = \"fuzz\"))] use crate::b::B; pub struct A;";
    let files = [
        ("src/lib.rs", "mod a; mod b;"),
        ("src/a.rs", with_feature),
        ("src/b.rs", "use crate::a::A; pub struct B(A);"),
    ];
    assert!(circle(&files).is_some());
}

#[test]
fn a_file_that_is_missing_or_is_no_rust_is_an_error() {
    let read = |file: &str| (file == "src/lib.rs").then(|| "mod a;".to_owned());
    assert!(Tree::read("src/lib.rs", &read).is_err());
    assert!(Tree::read("src/lib.rs", &|_| Some("fn (".into())).is_err());
}

#[test]
fn no_crate_has_a_circle() {
    assert_eq!(find().unwrap().0, Vec::<String>::new());
}

#[test]
fn a_circle_through_methods_of_self_and_of_its_fields_is_named() {
    let alias = "pub type Outer = super::whole::Whole;";
    let files = |field: &'static str| {
        [
            (
                "src/lib.rs",
                "mod whole; mod alias; mod part; mod a; mod b;",
            ),
            (
                "src/whole.rs",
                "pub struct Whole { pub part: super::part::Part }",
            ),
            ("src/alias.rs", alias),
            ("src/part.rs", field),
            (
                "src/a.rs",
                "impl super::alias::Outer { fn a(&self) { self.part.b(); } }",
            ),
            (
                "src/b.rs",
                "impl super::part::Part { pub fn b(&self) { self.c(); self.of.a(); } }",
            ),
        ]
    };
    assert_eq!(circle(&files("pub struct Part;")), None);
    let found = circle(&files(
        "pub struct Part { of: &'static crate::alias::Outer }",
    ));
    assert!(found.unwrap().starts_with("a circle of"));
}

#[test]
fn two_modules_side_by_side_are_named_when_files_below_them_use_each_other() {
    let uses = |back: &'static str| {
        let files = [
            ("src/lib.rs", "mod a; mod b;"),
            ("src/a.rs", "mod c; mod d;"),
            ("src/a/c.rs", "pub struct C(crate::b::B);"),
            ("src/a/d.rs", "pub struct D;"),
            ("src/b/mod.rs", "pub mod e; pub struct B;"),
            ("src/b/e.rs", back),
        ];
        let uses = uses_of(&files);
        assert_eq!(shortest_circle(&uses), None);
        pairs(&uses)
    };
    assert_eq!(uses("struct E(super::B);"), Vec::<String>::new());
    let words = "src/a and src/b use each other:\n  src/a/c.rs:1 uses crate::b::B of src/b/mod.rs\n  \
                 src/b/e.rs:1 uses crate::a::d::D of src/a/d.rs";
    assert_eq!(uses("struct E(crate::a::d::D);"), [words]);
}
