//! What a process says that finds no driver, an old one, half of one, or no device: an error with
//! the remedy, never a panic. Each is a process of its own, since a driver is loaded once.

use std::path::{Path, PathBuf};
use std::process::Command;

use pp_device::{CudaError, Device};
use pp_fakes::Fakes;

/// Runs as a process of its own, and prints what the driver says.
#[test]
fn child() {
    if std::env::var_os("PP_DRIVER_CHILD").is_none() {
        return;
    }
    match Device::count() {
        Ok(count) => println!("count {count}"),
        Err(error) => println!("count: {error}"),
    }
    match Device::open(7) {
        Ok(device) => println!("device {device:?}"),
        Err(error) => println!("device: {error}"),
    }
    if let Ok(device) = Device::open(0) {
        println!("about {:?}", device.about());
    }
}

fn run(prepare: impl FnOnce(&mut Command)) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "child", "--nocapture"])
        .env("PP_DRIVER_CHILD", "1");
    prepare(&mut command);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}");
    said
}

/// A driver that is new enough and has nothing but `cuInit`.
fn half_a_driver() -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("half-a-driver");
    std::fs::create_dir_all(&directory).unwrap();
    let source = "int cuInit(void) { return 0; }\n\
                  int cuDriverGetVersion(int *version) { *version = 13000; return 0; }\n";
    let file = directory.join("driver.c");
    std::fs::write(&file, source).unwrap();
    for library in ["libcuda.so", "libcuda.so.1"] {
        let mut cc = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
        cc.args(["-shared", "-fPIC", "-o"])
            .arg(directory.join(library))
            .arg(&file);
        assert!(cc.status().unwrap().success());
    }
    directory
}

#[test]
fn a_missing_driver_is_an_error_with_the_remedy() {
    if Device::count().is_ok() {
        // A machine with GPUs has one.
        return;
    }
    let said = run(|_| {});
    assert_eq!(Device::count(), Err(CudaError::NoDriver));
    assert!(
        said.contains("there is no CUDA driver")
            && said.contains("install the NVIDIA driver (580 or newer for the built-in kernels)"),
        "{said}"
    );
}

#[test]
fn an_old_driver_is_an_error_with_both_versions() {
    let said = run(|command| {
        Fakes::newest()
            .give_to(command)
            .env("PP_FAKE_DRIVER", "11080");
    });
    assert!(
        said.contains("version 11.8")
            && said.contains("12.0 or newer")
            && said.contains("for the built-in kernels to 580 or newer"),
        "{said}"
    );
}

#[test]
fn a_driver_that_lacks_a_function_is_an_error_that_names_it() {
    let half = half_a_driver();
    let said = run(|command| {
        command.env("LD_LIBRARY_PATH", &half);
    });
    assert!(
        said.contains("has no function cuGetErrorName") && said.contains("update"),
        "{said}"
    );
}

#[test]
fn a_driver_without_a_device_counts_none() {
    let said = run(|command| {
        Fakes::newest().give_to(command).env("PP_FAKE_DEVICES", "0");
    });
    assert!(said.contains("count 0"), "{said}");
    assert!(said.contains("no CUDA device 7: 0 can be seen"), "{said}");
}

#[test]
fn a_device_that_is_not_there_is_an_error_and_one_that_is_says_what_it_is() {
    let said = run(|command| {
        Fakes::newest().give_to(command).env("PP_FAKE_DEVICES", "3");
    });
    assert!(said.contains("count 3"), "{said}");
    assert!(
        said.contains("no CUDA device 7: 3 can be seen") && said.contains("CUDA_VISIBLE_DEVICES"),
        "{said}"
    );
    assert!(
        said.contains("ordinal: 0") && said.contains("driver_version: 13000"),
        "{said}"
    );
}
