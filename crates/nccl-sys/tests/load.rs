//! What is found, what is refused and with which words; and the real library on a machine that may have no GPU.

mod common;

use std::env;
use std::ffi::c_int;
use std::fs;
use std::path::Path;
use std::process::{self, Command, Output};
use std::ptr;

use nccl_sys::{LoadError, Nccl, Reason, ncclConfig_t, ncclResult_t};

use common::{compile, crate_dir, package, real_library, scratch, shared_library};

/// Every function without which a library is refused, but for the version.
const REQUIRED: &str = "ncclGetUniqueId ncclGetErrorString ncclGetLastError ncclCommInitRankConfig ncclCommFinalize \
    ncclCommDestroy ncclCommAbort ncclCommGetAsyncError ncclGroupStart ncclGroupEnd ncclSend ncclRecv ncclAllReduce ncclBroadcast";

fn required() -> Vec<&'static str> {
    REQUIRED.split(' ').collect()
}

/// A library with an `ncclGetVersion` of this body and with functions of these names that are never called.
fn stand_in(file: &str, body: &str, functions: &[&str]) -> std::path::PathBuf {
    let functions: String = functions
        .iter()
        .map(|name| format!("int {name}(void) {{ return 3; }}\n"))
        .collect();
    shared_library(
        file,
        &format!("int ncclGetVersion(int *version) {{ {body} }}\n{functions}"),
    )
}

fn reason(library: &Path) -> Reason {
    match Nccl::open(library) {
        Err(LoadError::Rejected(rejected)) => {
            assert_eq!(rejected.library, library);
            rejected.reason
        }
        other => panic!("{} gave {other:?}", library.display()),
    }
}

#[test]
fn a_library_without_a_required_function_is_refused_by_the_name_of_the_function() {
    for missing in ["ncclSend", "ncclGetUniqueId", "ncclBroadcast"] {
        let rest: Vec<&str> = required()
            .into_iter()
            .filter(|name| *name != missing)
            .collect();
        let library = stand_in(
            &format!("no-{missing}.so"),
            "*version = 22809; return 0;",
            &rest,
        );
        assert_eq!(reason(&library), Reason::NoSymbol { symbol: missing });
    }
}

#[test]
fn what_is_no_nccl_is_refused() {
    let error = Nccl::open("libm.so.6").unwrap_err().to_string();
    assert!(
        error.contains("libm.so.6: it has no function nccl"),
        "{error}"
    );
    let error = Nccl::open("/nowhere/libnccl.so.2").unwrap_err().to_string();
    assert!(
        error.contains("cannot be loaded") && error.contains("cannot open shared object file"),
        "{error}"
    );
}

#[test]
fn versions_that_were_never_tested_are_refused() {
    let version_of = |file: &str, body: &str| reason(&stand_in(file, body, &required()));
    let old = version_of("old.so", "*version = 21705; return 0;");
    assert!(
        matches!(old, Reason::TooOld(version) if version.to_string() == "2.17.5"),
        "{old:?}"
    );
    let ancient = version_of("ancient.so", "*version = 2708; return 0;");
    assert!(matches!(ancient, Reason::TooOld(_)), "{ancient:?}");
    let new = version_of("new.so", "*version = 30000; return 0;");
    assert!(
        matches!(new, Reason::OtherMajor(version) if version.major == 3),
        "{new:?}"
    );
    let silent = version_of("silent.so", "return 2;");
    assert_eq!(silent, Reason::NoVersion(ncclResult_t::ncclSystemError));
    let nonsense = version_of("nonsense.so", "*version = -1; return 0;");
    assert!(matches!(nonsense, Reason::OtherMajor(_)), "{nonsense:?}");
}

#[test]
fn an_older_library_is_used_and_what_it_lacks_is_listed() {
    let library = stand_in("older.so", "*version = 21800; return 0;", &required());
    let nccl = Nccl::open(&library).unwrap();
    assert_eq!(nccl.version().to_string(), "2.18.0");
    assert_eq!(nccl.path(), library.canonicalize().unwrap());
    assert!(nccl.functions().ncclCommRevoke.is_none());
}

/// Compares byte for byte with what a C compiler makes of the macro in the header.
#[test]
fn the_initializer_is_that_of_the_header() {
    let Some(package) = package() else { return };
    let program = scratch().join(format!("nccl-config-{}", process::id()));
    let include = [
        crate_dir().join("include"),
        package.join("nvidia/nccl/include"),
    ];
    let include = include.map(|directory| format!("-I{}", directory.display()));
    compile(
        "#include <nccl.h>\nextern int putchar(int);\nint main(void) {\n\
         static ncclConfig_t config = NCCL_CONFIG_INITIALIZER;\n\
         for (unsigned i = 0; i < sizeof config; ++i) putchar(((unsigned char *)&config)[i]);\nreturn 0; }\n",
        &[&include[0], &include[1]],
        &program,
    );
    let expected = Command::new(&program).output().unwrap().stdout;
    fs::remove_file(&program).unwrap();
    let config = ncclConfig_t::INITIALIZER;
    // SAFETY: a plain structure without padding (its fields add up to its size, which the bindings assert).
    let bytes: [u8; size_of::<ncclConfig_t>()] = unsafe { std::mem::transmute(config) };
    assert_eq!(bytes.as_slice(), expected);
}

/// Not a test but the process that the tests below start: loads, and prints what came of it.
#[test]
#[ignore = "started by other tests, with an environment of their making"]
fn load_nccl_in_a_process_of_its_own() {
    match Nccl::load() {
        Err(error) => println!("refused: {error}"),
        Ok(nccl) => {
            println!("loaded {} from {}", nccl.path().display(), nccl.origin());
            println!("version {}", nccl.version());
            let lacks_revoke = nccl.functions().ncclCommRevoke.is_none();
            println!("lacks ncclCommRevoke: {lacks_revoke}");
            if env::var_os("NCCL_SYS_TEST_INIT").is_some() {
                initialize(&nccl);
            }
        }
    }
}

/// Asks for two identifiers and then for a communicator on a device that is not there.
fn initialize(nccl: &Nccl) {
    let one = nccl.unique_id().unwrap();
    let other = nccl.unique_id().unwrap();
    assert_ne!(one.internal, [0; 128]);
    assert_ne!(one.internal, other.internal);
    println!("two identifiers");
    let mut comm = ptr::null_mut();
    let mut config = ncclConfig_t {
        blocking: 1,
        ..ncclConfig_t::INITIALIZER
    };
    let init = nccl.functions().ncclCommInitRankConfig;
    let ranks: c_int = 1;
    // SAFETY: both addresses are ours for the call, which is blocking.
    let result = unsafe { init(&raw mut comm, ranks, one, 0, &raw mut config) };
    match nccl.check("ncclCommInitRankConfig", result) {
        Ok(()) => println!("initialized"),
        Err(error) => println!("error: {error}"),
    }
}

/// The test program of this file, told to do nothing but load.
fn child() -> Command {
    let mut child = Command::new(env::current_exe().unwrap());
    child.args([
        "--exact",
        "load_nccl_in_a_process_of_its_own",
        "--ignored",
        "--nocapture",
    ]);
    for variable in ["PP_NCCL_LIB", "LD_LIBRARY_PATH", "PYTHONPATH"] {
        child.env_remove(variable);
    }
    // No device, even where there is one.
    child.env("CUDA_VISIBLE_DEVICES", "");
    child
}

fn printed(child: &mut Command) -> String {
    let Output {
        status,
        stdout,
        stderr,
    } = child.output().unwrap();
    let stdout = String::from_utf8_lossy(&stdout).into_owned();
    let stderr = String::from_utf8_lossy(&stderr);
    assert!(status.success(), "{status}\n{stdout}\n{stderr}");
    stdout
}

/// A directory in which the linker finds files of the right names that are no libraries.
fn broken() -> std::path::PathBuf {
    let directory = scratch().join("nccl-sys-broken");
    fs::create_dir_all(&directory).unwrap();
    for name in ["libnccl.so.2", "libnccl.so"] {
        fs::write(directory.join(name), "no library").unwrap();
    }
    directory
}

#[test]
fn the_real_library_is_loaded_and_refuses_to_start_without_a_device() {
    let Some(library) = real_library() else {
        return;
    };
    let printed = printed(
        child()
            .env("PP_NCCL_LIB", &library)
            .env("NCCL_SYS_TEST_INIT", "1"),
    );
    let path = library.canonicalize().unwrap();
    let expected = format!("loaded {} from PP_NCCL_LIB", path.display());
    assert!(printed.contains(&expected), "{printed}");
    assert!(printed.contains("version 2.28.9"), "{printed}");
    assert!(printed.contains("lacks ncclCommRevoke: false"), "{printed}");
    assert!(printed.contains("two identifiers"), "{printed}");
    assert!(
        printed.contains("error: ncclCommInitRankConfig failed with nccl"),
        "{printed}"
    );
}

#[test]
fn the_linker_is_asked_before_python() {
    let Some(library) = real_library() else {
        return;
    };
    let found = printed(child().env("LD_LIBRARY_PATH", library.parent().unwrap()));
    assert!(found.contains("from the dynamic linker"), "{found}");
    assert!(found.contains("version 2.28.9"), "{found}");
}

#[test]
fn the_package_of_a_python_is_found() {
    let Some(package) = package() else { return };
    let found = printed(
        child()
            .env("LD_LIBRARY_PATH", broken())
            .env("PYTHONPATH", package),
    );
    assert!(found.contains("from the Python on PATH"), "{found}");
    assert!(found.contains("version 2.28.9"), "{found}");
}

#[test]
fn a_library_that_was_named_and_cannot_be_used_is_an_error_though_another_is_there() {
    let nonsense = broken().join("libnccl.so.2");
    let mut named = child();
    named.env("PP_NCCL_LIB", &nonsense);
    if let Some(library) = real_library() {
        named.env("LD_LIBRARY_PATH", library.parent().unwrap());
    }
    let refused = printed(&mut named);
    assert!(
        refused.contains("refused: PP_NCCL_LIB is set, but "),
        "{refused}"
    );
    assert!(refused.contains(nonsense.to_str().unwrap()), "{refused}");
    assert!(refused.contains("cannot be loaded: "), "{refused}");
    assert!(
        refused.contains("file too short") || refused.contains("invalid ELF"),
        "{refused}"
    );
    let refused = printed(child().env("PP_NCCL_LIB", "libm.so.6"));
    assert!(
        refused.contains("libm.so.6: it has no function nccl"),
        "{refused}"
    );
}

#[test]
fn where_nothing_is_found_every_place_is_named_with_the_remedy() {
    let refused = printed(
        child()
            .env("LD_LIBRARY_PATH", broken())
            .env("PATH", "/nowhere"),
    );
    for part in [
        "refused: no usable NCCL was found: ",
        "libnccl.so.2: it cannot be loaded: ",
        "; libnccl.so: it cannot be loaded: ",
        "; the Python on PATH: no python3 on PATH",
        "pip install nvidia-nccl-cu13",
        "PP_NCCL_LIB",
    ] {
        assert!(refused.contains(part), "{part:?} is not in {refused}");
    }
}
