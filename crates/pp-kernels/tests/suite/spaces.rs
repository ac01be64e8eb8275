//! Which memory kernels work in: every wrong one is refused with the remedy, before the kernels are called.

use pp_kernels::{
    Chroma, ChunkShape, KernelError, KernelSet, Manifest, Payload, PayloadMut, SessionConfig,
    VideoPlanParts,
};
use pp_testing::assert_has;

use crate::common::{compile_c_file, root};

const HOST: fn() -> SessionConfig = || SessionConfig::host(40, 24, Chroma::Mono, 2);
/// No context of this address exists: whatever gets as far as the driver is refused there.
const CUDA: fn() -> SessionConfig = || SessionConfig::cuda(40, 24, Chroma::Mono, 2, 4096, 0);

fn faulty(variant: &str) -> KernelSet {
    let source = root().join("crates/pp-kernels/tests/plugins/faulty.c");
    KernelSet::load(&compile_c_file(&source, &[variant]))
        .expect("the plugin is sound on host memory")
}

fn on_device(set: &KernelSet, config: &SessionConfig) -> KernelError {
    // SAFETY: every use of this function is refused before the context is looked at, or when it turns out not to be
    // current, which no driver is asked to dereference it for.
    unsafe { set.open_stage_on_device("phase_b", config, &[]) }
        .expect_err("there is no such context")
}

fn wrong_space(error: KernelError) -> String {
    assert!(matches!(error, KernelError::WrongSpace { .. }), "{error:?}");
    error.to_string()
}

#[test]
fn host_kernels_refuse_a_device_and_device_kernels_the_host() {
    let (cpu, ptx) = (KernelSet::for_host(), KernelSet::for_device());
    let error = wrong_space(on_device(&cpu, &CUDA()));
    assert_has(&error, &["kernels cpu", "--kernels ptx"]);
    let error = wrong_space(
        ptx.open_stage("encode", &HOST(), &[])
            .expect_err("ptx works on devices"),
    );
    assert_has(&error, &["kernels ptx", "--kernels cpu"]);
    // The right kernels through the wrong door.
    let error = wrong_space(
        cpu.open_stage("encode", &CUDA(), &[])
            .expect_err("a device is opened elsewhere"),
    );
    assert!(error.contains("open_stage_on_device"), "{error}");
    let error = wrong_space(on_device(&ptx, &HOST()));
    assert!(error.contains("host memory"), "{error}");
    let no_context = SessionConfig::cuda(40, 24, Chroma::Mono, 2, 0, 0);
    assert!(wrong_space(on_device(&ptx, &no_context)).contains("no CUDA context"));
}

#[test]
fn kernels_that_claim_a_device_are_asked_and_say_themselves_that_they_do_not() {
    let error = on_device(&faulty("NO_FAULT_CUDA"), &CUDA());
    assert!(
        matches!(&error, KernelError::Failed { operation, .. } if operation == "create"),
        "{error:?}"
    );
}

#[test]
fn ptx_describes_itself_anywhere_and_needs_a_driver_to_open() {
    let ptx = KernelSet::for_device();
    let (about, cpu) = (ptx.describe(), KernelSet::for_host());
    assert!(about.cuda && !about.host);
    assert_eq!(about.name, "ptx");
    assert_eq!(about.context_frames, cpu.describe().context_frames);
    assert_eq!(about.chroma, cpu.describe().chroma);
    assert_ne!(
        about.digest,
        cpu.describe().digest,
        "their results differ, so ranks must not mix them"
    );
    assert_eq!(about.digest, KernelSet::for_device().describe().digest);

    // SAFETY: looking for the driver loads it.
    let has_driver = unsafe { cudarc::driver::sys::is_culib_present() };
    let error = on_device(&ptx, &CUDA()).to_string();
    if !has_driver {
        assert_has(&error, &["libcuda.so.1 was not found", "--kernels cpu"]);
    }
}

#[test]
fn a_payload_of_the_other_memory_is_refused() {
    let open = |name| KernelSet::for_host().open_stage(name, &HOST(), &[]);
    let mut middle = open("phase_b").expect("the cpu kernels open");
    let mut sink = open("decode").expect("the cpu kernels open");
    let shape = ChunkShape {
        frames: 1,
        steps: 0,
        context_frames: 0,
    };
    let layout = middle.layout(shape, 0).expect("a layout");
    let plan = VideoPlanParts::first(40, 24, 0);
    let bytes = layout.inputs.payload_bytes() as usize;
    let on_device = Payload::on_device(&layout.inputs, 4096, bytes).expect("numbers fit");
    let mut output = vec![0; layout.outputs.payload_bytes() as usize];
    let mut output = PayloadMut::new(&layout.outputs, &mut output).expect("bytes fit");
    let nothing = Payload::new(&Manifest::empty(), &[]).expect("nothing fits");
    let mut there = PayloadMut::on_device(&layout.outputs, 4096, bytes).expect("numbers fit");
    let refused = [
        middle.run(&plan, 0, &on_device, &mut output, None).err(),
        sink.decode(&plan, &on_device, &mut []).err(),
        middle.run(&plan, 0, &nothing, &mut there, None).err(),
    ];
    for refused in refused {
        match refused {
            Some(KernelError::BadCall { reason, .. }) => {
                assert!(reason.contains("lies on a device"), "{reason}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_device_payload_gives_addresses_and_no_bytes() {
    use pp_kernels::{DType, TensorSpec};
    let specs = [
        TensorSpec::new("a", DType::U8, &[3]).unwrap(),
        TensorSpec::new("b", DType::Bf16, &[2]).unwrap(),
    ];
    let list = Manifest::new(&specs).unwrap();
    let payload = Payload::on_device(&list, 0x7000, 260).unwrap();
    assert_eq!(payload.device_tensor("b", DType::Bf16, &[2]), Ok(0x7100));
    assert!(payload.tensor("b", DType::Bf16, &[2]).is_err());
    assert!(payload.device_tensor("b", DType::U8, &[2]).is_err());
    assert_eq!(payload.is_on_device(), Some(true));
    let bytes = [0; 260];
    let host = Payload::new(&list, &bytes).unwrap();
    assert!(
        host.device_tensor("b", DType::Bf16, &[2]).is_err() && host.is_on_device() == Some(false)
    );

    for (address, len, reason) in [
        (0x7000, 259, "the tensors need 260 bytes"),
        (0x7080, 260, "multiple of 256"),
        (0, 260, "not 0"),
    ] {
        let error = Payload::on_device(&list, address, len).unwrap_err();
        assert!(error.message.contains(reason), "{error}");
        let error = PayloadMut::on_device(&list, address, len).unwrap_err();
        assert!(error.message.contains(reason), "{error}");
    }
}
