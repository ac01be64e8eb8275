//! A stand-in for libcuda to link with.
//!
//! cust asks the linker for `-lcuda`, which comes with a driver or a toolkit. For a shared library it is enough that the
//! file is there and has the right name inside: the functions are looked up when the plugin is loaded, in the libcuda of
//! the driver.

use std::env;
use std::error::Error;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?);
    let source = out.join("stand_in.c");
    fs::write(
        &source,
        "int cuInit(unsigned flags) { (void)flags; return 999; }\n",
    )?;
    let compiler = env::var_os("CC").unwrap_or_else(|| "cc".into());
    let status = Command::new(&compiler)
        .args(["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"])
        .arg(out.join("libcuda.so"))
        .arg(&source)
        .status()
        .map_err(|error| format!("cannot start {}: {error}", compiler.display()))?;
    if !status.success() {
        return Err(format!("{} ended with {status}", compiler.display()).into());
    }
    // By a search path for rustc, cargo would let every test that it starts find the stand-in.
    println!("cargo:rustc-link-arg-cdylib=-L{}", out.display());
    // The stand-in has none of the functions, so the linker would leave its name out; then a machine without a driver
    // would miss some function instead of the library.
    println!("cargo:rustc-link-arg-cdylib=-Wl,--push-state,--no-as-needed,-lcuda,--pop-state");
    Ok(())
}
