//! Plugins from files: the sound ones pass every check, each faulty one is refused or caught with its reason.

mod common;

use std::path::{Path, PathBuf};

use common::{compile_c, compile_c_file, median, root, rust_plugin, scratch};
use pp_kernels::check::Bench;
use pp_kernels::{
    Chroma, ChunkShape, FrameView, KernelError, KernelSet, LoadError, Payload, PayloadMut,
    SessionConfig, VideoPlanParts,
};

fn faulty(fault: &str) -> PathBuf {
    let source = root().join("crates/pp-kernels/tests/plugins/faulty.c");
    // Each fault leaves something of the sound plugin unused.
    compile_c_file(&source, &[fault])
}

/// The error and its causes in one line.
fn load_error(path: &Path) -> String {
    let error = KernelSet::load(path).expect_err("the file must be refused");
    let mut text = error.to_string();
    let mut source = std::error::Error::source(&error);
    while let Some(cause) = source {
        text += &format!(": {cause}");
        source = cause.source();
    }
    text
}

/// The checks that fail on host memory, and why.
fn failed_checks(path: &Path) -> Vec<(&'static str, String)> {
    let set = KernelSet::load_untested(path).expect("the file loads");
    common::failed_checks(&Bench::on_host(&set))
}

#[test]
fn the_built_in_kernels_pass_every_check() {
    assert_eq!(
        common::failed_checks(&Bench::on_host(&KernelSet::for_host())),
        []
    );
}

#[test]
fn the_c_example_passes_every_check() {
    assert_eq!(failed_checks(&median()), []);
}

#[test]
fn the_rust_example_passes_every_check() {
    assert_eq!(failed_checks(&rust_plugin("pp-plugin-temporal")), []);
}

#[test]
fn tables_of_other_minor_versions_are_accepted() {
    for variant in ["NO_FAULT_OLDER", "NO_FAULT_NEWER"] {
        assert_eq!(failed_checks(&faulty(variant)), [], "{variant}");
    }
}

#[test]
fn a_file_that_is_no_library_is_refused_with_the_reason() {
    let missing = scratch("missing.so");
    assert!(matches!(
        KernelSet::load(&missing),
        Err(LoadError::Unreadable { .. })
    ));
    assert!(
        load_error(&missing).contains("No such file"),
        "{}",
        load_error(&missing)
    );

    let text = scratch("text.so");
    std::fs::write(&text, "this is not a library at all").unwrap();
    assert!(
        load_error(&text)
            .contains("not an ELF shared library (it does not start with 7f 45 4c 46)")
    );

    let empty = scratch("empty.so");
    std::fs::write(&empty, "").unwrap();
    assert!(load_error(&empty).contains("shorter than an ELF header"));

    assert!(load_error(&root()).contains("it is a directory"));

    // Mapping a file that was cut off would end in SIGBUS, so it must be seen before.
    let cut = scratch("cut.so");
    let whole = std::fs::read(median()).unwrap();
    for (length, reason) in [
        (whole.len() / 8, "it is cut off: it has"),
        (100, "cut off in its program headers"),
    ] {
        std::fs::write(&cut, &whole[..length]).unwrap();
        assert!(load_error(&cut).contains(reason), "{}", load_error(&cut));
    }

    let plain = compile_c("plain", "int main_is_elsewhere(void) { return 0; }\n", &[]);
    assert!(matches!(
        KernelSet::load(&plain),
        Err(LoadError::NoEntry { .. })
    ));
    assert!(load_error(&plain).contains("pp_kernels_entry_v1"));
}

#[test]
fn a_library_that_is_missing_is_named_with_the_remedy() {
    // The plugin asks for libcuda.so.1 at load time, which comes with a driver.
    let cust = rust_plugin("pp-plugin-cust");
    match KernelSet::load(&cust) {
        Ok(set) => assert_eq!(set.describe().name, "cust"),
        Err(LoadError::NeedsLibrary { library, .. }) => {
            assert_eq!(library, "libcuda.so.1");
            let error = load_error(&cust);
            assert!(error.contains("install that (580 or newer)"), "{error}");
            assert!(error.contains("--kernels cpu"), "{error}");
        }
        Err(error) => panic!("{error:?}"),
    }
}

#[test]
fn a_table_that_cannot_be_used_is_refused_with_the_reason() {
    let cases = [
        ("FAULT_NO_ENTRY", "has no symbol pp_kernels_entry_v1"),
        ("FAULT_UNRESOLVED", "a_symbol_that_is_nowhere"),
        ("FAULT_NULL", "returned null"),
        ("FAULT_MISALIGNED", "is not a multiple of 8"),
        ("FAULT_MAGIC", "not with the magic 0x31534c4e524b5050"),
        ("FAULT_MAJOR", "it speaks ABI 2.7, this program speaks 1.1"),
        (
            "FAULT_SHORT",
            "the table has 40 bytes, version 1.0 needs at least 72",
        ),
        ("FAULT_MISSING", "the entry `decode` is missing"),
        ("FAULT_NAME", "its name is not a text that ends with a NUL"),
        (
            "FAULT_SELF_TEST",
            "failed its own self test: kernels median failed in self_test: 2 + 2 is 5",
        ),
    ];
    for (fault, reason) in cases {
        let error = load_error(&faulty(fault));
        assert!(error.contains(reason), "{fault}: {error}");
    }
}

#[test]
fn the_check_names_what_a_faulty_plugin_does() {
    let identity = "zero steps is the identity, bit for bit, at every size";
    let layout = "layout fits the session and does not change";
    let calls = "one and two steps make the calls that the plan expects";
    let cases = [
        ("FAULT_SELF_TEST", "self test passes", "2 + 2 is 5"),
        (
            "FAULT_OVERRUN",
            calls,
            "wrote past the end of the payload (byte 0 behind it) in phase_b",
        ),
        (
            "FAULT_GAP",
            calls,
            "wrote past the end of tensor conditioning_embeds in encode",
        ),
        (
            "FAULT_ERROR",
            calls,
            "failed in phase_b: the model file is missing",
        ),
        ("FAULT_ERROR_TEXT", calls, "failed in phase_b: x xxx"),
        ("FAULT_LAYOUT_COUNT", layout, "17 input tensors, at most 16"),
        ("FAULT_LAYOUT_DTYPE", layout, "unknown dtype 99"),
        (
            "FAULT_LAYOUT_SIZE",
            layout,
            "more than 68719476736 elements",
        ),
        ("FAULT_LAYOUT_NAME", layout, "tensor name \"\" is not 1 to"),
        (
            "FAULT_CALLS",
            calls,
            "made 0 generator calls, the plan expects 1",
        ),
        ("FAULT_IDENTITY", identity, "16x16 Mono comes back changed"),
        ("FAULT_NO_SESSION", layout, "it said OK and gave no session"),
    ];
    for (fault, name, reason) in cases {
        let failed = failed_checks(&faulty(fault));
        let found = failed
            .iter()
            .any(|(check, why)| *check == name && why.contains(reason));
        assert!(found, "{fault}: {failed:?}");
    }
}

#[test]
fn the_check_holds_context_against_what_was_sent() {
    let source = root().join("crates/pp-kernels/tests/plugins/context.c");
    let sound = compile_c_file(&source, &["NO_FAULT_CONTEXT"]);
    assert_eq!(failed_checks(&sound), []);
    let cases = [
        (
            "FAULT_CONTEXT_FILTERED",
            "context_frames are the frames that were sent before",
            "context_frames of chunk 1 are not the last 1 frames of latents_in",
        ),
        (
            "FAULT_CONTEXT_OTHER",
            "context_frames are the frames that were sent before",
            "context_frames of chunk 1 are not the last 1 frames of latents_in",
        ),
        (
            "FAULT_HIDDEN_STATE",
            "a Phase B that is started anew goes on as the old one",
            "a session that begins with chunk 1,",
        ),
    ];
    for (fault, name, reason) in cases {
        let failed = failed_checks(&compile_c_file(&source, &[fault]));
        let [(check, why)] = &failed[..] else {
            panic!("{fault}: {failed:?}");
        };
        assert!(
            *check == name && why.contains(reason),
            "{fault}: {failed:?}"
        );
    }
}

#[test]
fn a_panic_is_an_error_and_ends_the_session() {
    let set = KernelSet::load(&rust_plugin("pp-plugin-panicking")).unwrap();
    let open = |width| set.open(&SessionConfig::host(width, 16, Chroma::Mono, 1));

    let error = open(20).unwrap_err();
    assert!(
        matches!(&error, KernelError::Panicked { operation: "create", message, .. } if message == "no session of width 20")
    );

    for (width, operation, text) in [
        (21, "encode", "a panic without a text"),
        (22, "phase_b", "long long "),
    ] {
        let mut session = open(width).unwrap();
        let shape = ChunkShape {
            frames: 1,
            steps: 0,
            context_frames: 0,
        };
        let layout = session.layout(shape).unwrap();
        let plan = VideoPlanParts::first(width, 16, 0);
        let frame = vec![0; width as usize * 16];
        let frame = FrameView::packed(&frame, width, 16, Chroma::Mono).unwrap();
        let (mut input, mut output) = (vec![0; 300], vec![0; 300]);
        let encoded = session.encode(
            &[frame],
            &plan,
            &mut PayloadMut::new(&layout.inputs, &mut input).unwrap(),
        );
        let result = encoded.and_then(|()| {
            let input = Payload::new(&layout.inputs, &input).unwrap();
            session.phase_b(
                &plan,
                &input,
                &mut PayloadMut::new(&layout.outputs, &mut output).unwrap(),
            )
        });
        match result {
            Err(KernelError::Panicked {
                operation: found,
                message,
                ..
            }) => {
                assert_eq!(found, operation);
                assert!(
                    message.starts_with(text) && message.len() <= 512,
                    "{message}"
                );
            }
            other => panic!("{other:?}"),
        }
        // Nothing more is asked of a session that panicked.
        assert!(matches!(
            session.layout(shape),
            Err(KernelError::Panicked { .. })
        ));
    }
    // A panic while a session is dropped is stopped too.
    drop(open(23).unwrap());
}
