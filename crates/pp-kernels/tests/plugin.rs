//! Plugins from files: the sound ones pass every check, each faulty one is refused or caught with its reason.

mod common;

use pp_testing::assert_has;
use std::path::{Path, PathBuf};

use common::{compile_c, compile_c_file, median, root, rust_plugin, scratch};
use pp_kernels::check::Subject;
use pp_kernels::{
    Bits, Chroma, ChunkShape, FrameGeometry, FrameView, KernelError, KernelSet, LoadError,
    Manifest, Payload, PayloadMut, SessionConfig, StageSession, VideoPlanParts,
};
use pp_testing::rows;

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
    common::failed_checks(&Subject::on_host(&set))
}

#[test]
fn the_built_in_kernels_pass_every_check() {
    assert_eq!(
        common::failed_checks(&Subject::on_host(&KernelSet::for_host())),
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

fn three() -> PathBuf {
    compile_c_file(&root().join("crates/pp-kernels/tests/plugins/three.c"), &[])
}

/// Among them: parts, laps and groups of two and three give what the whole stage gives.
#[test]
fn three_stages_of_their_own_pass_every_check() {
    assert_eq!(failed_checks(&three()), []);
}

#[test]
fn a_plugin_brings_its_stages_its_frames_and_takes_arguments() {
    let set = KernelSet::load(&three()).unwrap();
    let names: Vec<_> = set.stages().iter().map(|stage| &stage.name[..]).collect();
    assert_eq!(names, ["read", "soften", "write"]);
    let soften = &set.stages()[1];
    assert!(soften.in_parts && soften.in_group && soften.in_ring);
    let config = SessionConfig::host(20, 16, Chroma::Mono, 2);
    let open = |name, config: &SessionConfig, args: &[(&str, &str)]| {
        let args: Vec<_> = (args.iter())
            .map(|(k, v)| (k.to_string(), v.to_string()))
            .collect();
        set.open_stage(name, config, &args)
    };
    let refused =
        |result: Result<_, KernelError>| result.map(|_: StageSession| ()).unwrap_err().to_string();

    let sink = open("write", &config, &[]).unwrap();
    let expected = FrameGeometry {
        width: 40,
        height: 32,
        chroma: Chroma::Mono,
        bits: Bits::Eight,
        frames_per_frame: 2,
    };
    assert_eq!(sink.frames(), expected);
    let error = refused(open("blur", &config, &[]));
    assert_has(&error, &["no stage blur; theirs are read, soften, write"]);
    let error = refused(open(
        "soften",
        &config,
        &[("share", "1"), ("sharpness", "2")],
    ));
    assert!(error.contains("unknown argument sharpness"), "{error}");
    let error = refused(open("soften", &config, &[("sh\0are", "1")]));
    assert!(error.contains("holds a NUL"), "{error}");
    let error =
        refused(KernelSet::for_host().open_stage("encode", &config, &[("a".into(), "b".into())]));
    assert!(error.contains("unknown argument a"), "{error}");

    // The argument counts: with a share of 1 every sample becomes the mean, 2.
    let shape = ChunkShape {
        frames: 1,
        steps: 1,
        context_frames: 0,
    };
    let mut session = open("soften", &config, &[("share", "1")]).unwrap();
    let layout = session.layout(shape, 0).unwrap();
    let samples = [1i32, 3].repeat(20 * 16 / 2);
    let input: Vec<u8> = samples
        .iter()
        .flat_map(|sample| sample.to_le_bytes())
        .collect();
    let mut output = vec![0; input.len()];
    let plan = VideoPlanParts::first(20, 16, 1);
    let calls = session.run(
        &plan,
        0,
        &Payload::new(&layout.inputs, &input).unwrap(),
        &mut PayloadMut::new(&layout.outputs, &mut output).unwrap(),
        None,
    );
    assert_eq!(calls.unwrap(), 1);
    assert_eq!(output, 2i32.to_le_bytes().repeat(20 * 16));
}

#[test]
fn what_a_stage_cannot_do_is_refused_before_it_is_asked() {
    let set = KernelSet::for_host();
    let config = SessionConfig::host(20, 16, Chroma::Mono, 2);
    let refused = |name, config: SessionConfig| {
        let result = set.open_stage(name, &config, &[]);
        result.expect_err("it is refused").to_string()
    };
    let (parts, laps, members) = (
        SessionConfig { parts: 2, ..config },
        SessionConfig { laps: 2, ..config },
        SessionConfig {
            members: 2,
            ..config
        },
    );
    for (name, config, words) in [
        (
            "encode",
            parts,
            "the stage encode of these kernels cannot be cut into parts",
        ),
        ("decode", laps, "cannot be walked in a ring"),
        ("encode", members, "cannot be run by a group"),
        ("phase_b", SessionConfig { laps: 0, ..config }, "0 laps"),
        (
            "phase_b",
            SessionConfig {
                member: 1,
                ..config
            },
            "member 1 of 1",
        ),
    ] {
        let error = refused(name, config);
        assert!(error.contains(words), "{error}");
    }
    let mut session = set.open_stage("phase_b", &config, &[]).unwrap();
    let shape = ChunkShape {
        frames: 1,
        steps: 0,
        context_frames: 0,
    };
    let error = session.layout(shape, 1).unwrap_err().to_string();
    assert!(error.contains("lap 1 of 1"), "{error}");
    let plan = VideoPlanParts::first(20, 16, 0);
    let mut nothing = PayloadMut::new(&Manifest::empty(), &mut []).unwrap();
    let error = session
        .encode(&[], &plan, &mut nothing)
        .unwrap_err()
        .to_string();
    assert_has(&error, &["called as a Source, it is a Middle"]);

    let grouped = KernelSet::load(&three()).unwrap();
    let mut alone = grouped.open_stage("soften", &members, &[]).unwrap();
    let empty = Payload::new(&Manifest::empty(), &[]).unwrap();
    let error = alone
        .run(&plan, 0, &empty, &mut nothing, None)
        .unwrap_err()
        .to_string();
    assert_has(
        &error,
        &["the group is not given, the session has 2 members"],
    );
    let list = alone.layout(shape, 0).unwrap().inputs;
    let elsewhere = Payload::of_leader(&list);
    let error = set
        .open_stage("phase_b", &config, &[])
        .and_then(|mut session| session.run(&plan, 0, &elsewhere, &mut nothing, None))
        .unwrap_err()
        .to_string();
    assert!(error.contains("member 0 of a group gives it"), "{error}");
}

/// Also a stage that rebuilds from nothing, if its flag says that it has no memory.
#[test]
fn tables_of_all_minor_versions_are_accepted() {
    for variant in ["NO_FAULT_OLDER", "NO_FAULT_NEWER", "NO_FAULT_NO_MEMORY"] {
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
    assert!(load_error(&plain).contains("pp_kernels_entry_v2"));

    let old = compile_c(
        "old",
        "const void *pp_kernels_entry_v1(void) { return 0; }\n",
        &[],
    );
    assert!(matches!(
        KernelSet::load(&old),
        Err(LoadError::OldEntry { .. })
    ));
    let error = load_error(&old);
    assert_has(&error, &["ABI version 1", "export pp_kernels_entry_v2"]);
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
    let cases = rows(
        "
        FAULT_NO_ENTRY | has no symbol pp_kernels_entry_v2
        FAULT_UNRESOLVED | a_symbol_that_is_nowhere
        FAULT_NULL | returned null
        FAULT_MISALIGNED | is not a multiple of 8
        FAULT_MAGIC | not with the magic 0x32534c4e524b5050
        FAULT_MAJOR | it speaks ABI 3.7, this program speaks 2.4
        FAULT_SHORT | the table has 40 bytes, version 2.0 needs at least 56
        FAULT_MISSING | the entry `run` is missing
        FAULT_NAME | its name is not a text that ends with a NUL
        FAULT_STAGE_COUNT | 17 stages, at most 16
        FAULT_STAGE_ORDER | stage 0, encode, is a Middle and must be a Source
        FAULT_STAGE_NAME | a stage's name is not a text that ends with a NUL
        FAULT_STAGE_TWICE | two stages are named encode
        FAULT_STAGE_KIND | the stage phase_b is of the unknown kind 9
        FAULT_STAGE_FLAGS | the stage encode has the flags 0x1
        FAULT_SELF_TEST | failed its own self test: kernels median failed in self_test: 2 + 2 is 5
    ",
    );
    for [fault, reason] in cases {
        let error = load_error(&faulty(fault));
        assert!(error.contains(reason), "{fault}: {error}");
    }
}

#[test]
fn the_check_names_what_a_faulty_plugin_does() {
    let cases = rows(
        "
        FAULT_SELF_TEST | self test passes | 2 + 2 is 5
        FAULT_OVERRUN | one and two steps make the calls | phase_b wrote behind tensor latents_out (bytes changed: 1)
        FAULT_GAP | one and two steps make the calls | encode wrote behind tensor conditioning_embeds (bytes changed: 1)
        FAULT_FAR_OVERRUN | one and two steps make the calls | phase_b wrote behind tensor latents_out (bytes changed: 4000)
        FAULT_WRITES_INPUT | one and two steps make the calls | phase_b wrote into tensor latents_in, which it may only read
        FAULT_STRIDE | one and two steps make the calls | decode wrote between the rows of plane 0 of frame 0
        FAULT_ERROR | one and two steps make the calls | failed in phase_b: the model file is missing
        FAULT_ERROR_TEXT | one and two steps make the calls | failed in phase_b: x xxx
        FAULT_LAYOUT_COUNT | layout fits the session | 17 input tensors, at most 16
        FAULT_LAYOUT_DTYPE | layout fits the session | unknown dtype 99
        FAULT_LAYOUT_SIZE | layout fits the session | more than 68719476736 elements
        FAULT_LAYOUT_NAME | layout fits the session | tensor name \"\" is not 1 to
        FAULT_CALLS | one and two steps make the calls | phase_b made 0 generator calls, the plan expects 1
        FAULT_LAYOUT_CHAIN | layout fits the session | phase_b gets [katents_in
        FAULT_LAYOUT_SOURCE | layout fits the session | 1 input tensors of a Source, which has none
        FAULT_FALSE_FLAGS | parts give what the whole stage gives | phase_b made 3 generator calls, the plan expects 2
        FAULT_GEOMETRY | zero steps is the identity | frames of 0x24: each side must lie within 1
        FAULT_GEOMETRY_OF_SOURCE | zero steps is the identity | the stage encode is no sink and changed its frames
        FAULT_GEOMETRY_RATE | zero steps is the identity | 0 frames for each of the source
        FAULT_IDENTITY | zero steps is the identity | 40x24 Mono comes back changed
        FAULT_TEN_BITS | frames of 10 bits a sample do what those of 8 do | 40x24 Mono comes back changed
        FAULT_NO_SESSION | layout fits the session | it said OK and gave no session
        FAULT_FORGETS | every byte of the output is written |  of tensor latents_out of phase_b in chunk 0
        FAULT_ARGS | bad arguments give an error and leave the session usable | encode with the unknown --plugin-arg no-plugin-knows-this=1 is not refused
        FAULT_NO_CONTEXT | bad arguments give an error and leave the session usable | phase_b with recompute and no context_frames is not refused
    ",
    );
    for [fault, name, reason] in cases {
        let failed = failed_checks(&faulty(fault));
        let found = failed
            .iter()
            .any(|(check, why)| check.starts_with(name) && why.contains(reason));
        assert!(found, "{fault}: {failed:?}");
    }
}

#[test]
fn the_check_holds_context_against_what_was_sent() {
    let source = root().join("crates/pp-kernels/tests/plugins/context.c");
    let sound = compile_c_file(&source, &["NO_FAULT_CONTEXT"]);
    assert_eq!(failed_checks(&sound), []);
    let cases = rows("
        FAULT_CONTEXT_FILTERED | context_frames are the frames that were sent before | context_frames of chunk 1 are not the last 1 frames of latents_in
        FAULT_CONTEXT_OTHER | context_frames are the frames that were sent before | context_frames of chunk 1 are not the last 1 frames of latents_in
        FAULT_NO_RESET | a stream goes on after a hard cut as a new one | byte 0 of tensor latents_out of phase_b in chunk 0
        FAULT_FALSE_GAPS | frames may be missing between chunks of stages that say so | behind gaps, a session that saw other chunks, and that begins with chunk 1,
        FAULT_LOST_IN_GAPS | frames may be missing between chunks of stages that say so | behind gaps, a recompute in place of the cache kept gives another result: byte 0 of tensor latents_out of phase_b in chunk 1
        FAULT_FALSE_STEPS | steps may differ between chunks of stages that say so | a chunk behind chunks of other steps gives another result: byte 0 of tensor latents_out of phase_b in chunk 1
        FAULT_HIDDEN_STATE | a middle stage that is started anew goes on as the old one | a session that saw other chunks, and that begins with chunk 0,
    ");
    for [fault, name, reason] in cases {
        let failed = failed_checks(&compile_c_file(&source, &[fault]));
        let is_named = |(check, why): &(&str, String)| *check == name && why.contains(reason);
        assert!(failed.iter().any(is_named), "{fault}: {failed:?}");
    }
}

#[test]
fn a_panic_is_an_error_and_ends_the_session() {
    let set = KernelSet::load(&rust_plugin("pp-plugin-panicking")).unwrap();
    let open_stage = |name, width| {
        let config = SessionConfig::host(width, 16, Chroma::Mono, 1);
        set.open_stage(name, &config, &[])
    };
    let open = |width| open_stage("encode", width);

    let error = open(20).unwrap_err();
    assert!(
        matches!(&error, KernelError::Panicked { operation, message, .. } if operation == "create" && message == "no session of width 20")
    );

    for (width, operation, text) in [
        (21, "encode", "a panic without a text"),
        (22, "phase_b", "long long "),
    ] {
        let mut session = open_stage(operation, width).unwrap();
        let shape = ChunkShape {
            frames: 1,
            steps: 0,
            context_frames: 0,
        };
        let layout = session.layout(shape, 0).unwrap();
        let plan = VideoPlanParts::first(width, 16, 0);
        let frame = vec![0; width as usize * 16];
        let frame = FrameView::packed(&frame, &session.frames()).unwrap();
        let (input, mut output) = (vec![0; 300], vec![0; 300]);
        let input = Payload::new(&layout.inputs, &input).unwrap();
        let mut output = PayloadMut::new(&layout.outputs, &mut output).unwrap();
        let result = match operation {
            "encode" => session.encode(&[frame], &plan, &mut output),
            _ => (session.run(&plan, 0, &input, &mut output, None)).map(|_| ()),
        };
        match result {
            Err(KernelError::Panicked {
                operation: found,
                message,
                ..
            }) => {
                assert_eq!(found, operation);
                assert!(
                    message.starts_with(text) && message.len() <= 16 << 10,
                    "{message}"
                );
            }
            other => panic!("{other:?}"),
        }
        // Nothing more is asked of a session that panicked.
        assert!(matches!(
            session.layout(shape, 0),
            Err(KernelError::Panicked { .. })
        ));
    }
    // A panic while a session is dropped is stopped too.
    drop(open(23).unwrap());
}
