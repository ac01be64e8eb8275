//! The functions of the fakes that tests call directly, as plain pointers.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use crate::libraries::Fakes;

/// A handle of the driver or of NCCL.
pub type Handle = *mut c_void;
/// `ncclUniqueId`.
pub type UniqueId = [c_char; 128];
/// `ncclInProgress`.
pub const IN_PROGRESS: c_int = 7;

/// `ncclConfig_t`, as far as the fake reads it.
#[derive(Debug)]
#[repr(C)]
pub struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
}

impl Config {
    /// The defaults of a caller that was built for NCCL 2.28.9.
    pub fn new(blocking: bool) -> Self {
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: 22809,
            blocking: blocking.into(),
        }
    }
}

/// `CUmemAllocationProp`: memory of a device that can be exported as a file descriptor.
#[derive(Debug)]
#[repr(C)]
pub struct Properties {
    kind: c_uint,
    handle_types: c_uint,
    location: c_uint,
    device: c_int,
    of_windows: *mut c_void,
    flags: [u8; 8],
}

impl Properties {
    /// For this device.
    pub fn of(device: c_int) -> Self {
        Self {
            kind: 1,
            handle_types: 1,
            location: 1,
            device,
            of_windows: std::ptr::null_mut(),
            flags: [0; 8],
        }
    }
}

/// `CUmemAccessDesc`: a device may read and write.
#[derive(Debug)]
#[repr(C)]
pub struct Right {
    location: c_uint,
    device: c_int,
    flags: c_uint,
}

impl Right {
    /// For this device.
    pub fn of(device: c_int) -> Self {
        Self {
            location: 1,
            device,
            flags: 3,
        }
    }
}

macro_rules! functions {
    ($($name:ident = $symbol:literal: fn($($argument:ty),*);)*) => {
        /// Every function answers with the driver's or NCCL's code; 0 is success.
        #[derive(Debug)]
        pub struct Raw {
            $(#[doc = $symbol] pub $name: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Raw {
            /// The functions of the libraries that this process has loaded.
            pub fn get() -> &'static Raw {
                static RAW: OnceLock<Raw> = OnceLock::new();
                let loaded = Fakes::newest().load();
                RAW.get_or_init(|| Raw {
                    // SAFETY: each symbol is a function of the fakes with these C types.
                    $($name: unsafe { loaded.function($symbol) },)*
                })
            }
        }
    };
}

functions! {
    init = "cuInit": fn(c_uint);
    retain = "cuDevicePrimaryCtxRetain": fn(*mut Handle, c_int);
    set_current = "cuCtxSetCurrent": fn(Handle);
    alloc = "cuMemAlloc_v2": fn(*mut u64, usize);
    free = "cuMemFree_v2": fn(u64);
    stream_create = "cuStreamCreateWithPriority": fn(*mut Handle, c_uint, c_int);
    stream_wait = "cuStreamWaitEvent": fn(Handle, Handle, c_uint);
    stream_synchronize = "cuStreamSynchronize": fn(Handle);
    stream_query = "cuStreamQuery": fn(Handle);
    event_create = "cuEventCreate": fn(*mut Handle, c_uint);
    event_record = "cuEventRecord": fn(Handle, Handle);
    event_query = "cuEventQuery": fn(Handle);
    event_synchronize = "cuEventSynchronize": fn(Handle);
    download = "cuMemcpyDtoHAsync_v2": fn(*mut c_void, u64, usize, Handle);
    copy = "cuMemcpyDtoDAsync_v2": fn(u64, u64, usize, Handle);
    fill = "cuMemsetD8Async": fn(u64, u8, usize, Handle);
    write_word = "cuStreamWriteValue32_v2": fn(Handle, u64, u32, c_uint);
    attribute = "cuDeviceGetAttribute": fn(*mut c_int, c_int, c_int);
    peer_attribute = "cuDeviceGetP2PAttribute": fn(*mut c_int, c_uint, c_int, c_int);
    can_access_peer = "cuDeviceCanAccessPeer": fn(*mut c_int, c_int, c_int);
    memory_info = "cuMemGetInfo_v2": fn(*mut usize, *mut usize);
    granularity = "cuMemGetAllocationGranularity": fn(*mut usize, *const Properties, c_uint);
    create = "cuMemCreate": fn(*mut u64, usize, *const Properties, u64);
    release = "cuMemRelease": fn(u64);
    export = "cuMemExportToShareableHandle": fn(*mut c_int, u64, c_uint, u64);
    import = "cuMemImportFromShareableHandle": fn(*mut u64, *mut c_void, c_uint);
    reserve = "cuMemAddressReserve": fn(*mut u64, usize, usize, u64, u64);
    free_addresses = "cuMemAddressFree": fn(u64, usize);
    map = "cuMemMap": fn(u64, usize, usize, u64, u64);
    unmap = "cuMemUnmap": fn(u64, usize);
    set_access = "cuMemSetAccess": fn(u64, usize, *const Right, usize);
    register = "cuMemHostRegister_v2": fn(*mut c_void, usize, c_uint);
    unregister = "cuMemHostUnregister": fn(*mut c_void);
    device_pointer = "cuMemHostGetDevicePointer_v2": fn(*mut u64, *mut c_void, c_uint);
    module_load = "cuModuleLoadData": fn(*mut Handle, *const c_char);
    module_function = "cuModuleGetFunction": fn(*mut Handle, Handle, *const c_char);
    launch = "cuLaunchKernel": fn(
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void
    );
    unique_id = "ncclGetUniqueId": fn(*mut UniqueId);
    comm_init = "ncclCommInitRankConfig": fn(*mut Handle, c_int, UniqueId, c_int, *const Config);
    comm_abort = "ncclCommAbort": fn(Handle);
    comm_error = "ncclCommGetAsyncError": fn(Handle, *mut c_int);
    send = "ncclSend": fn(u64, usize, c_int, c_int, Handle, Handle);
    recv = "ncclRecv": fn(u64, usize, c_int, c_int, Handle, Handle);
}

/// `raw!(name(arguments))`: the code that a call of the fakes gives.
#[macro_export]
macro_rules! raw {
    ($name:ident($($argument:expr),* $(,)?)) => {
        // SAFETY: a function of the fakes with arguments of its types; what they point to outlives the call, and what
        // a stream does with memory afterwards is checked by the fakes themselves.
        unsafe { ($crate::raw::Raw::get().$name)($($argument),*) }
    };
}

/// As [`raw!`], for calls that must succeed.
#[macro_export]
macro_rules! ok {
    ($name:ident($($argument:expr),* $(,)?)) => {
        assert_eq!($crate::raw!($name($($argument),*)), 0, stringify!($name))
    };
}

/// The context of a device, current on this thread, and a stream of it.
pub fn device(ordinal: c_int) -> (Handle, Handle) {
    let (mut context, mut stream) = (std::ptr::null_mut(), std::ptr::null_mut());
    ok!(init(0));
    ok!(retain(&mut context, ordinal));
    ok!(set_current(context));
    ok!(stream_create(&mut stream, 1, 0));
    (context, stream)
}

const PTX: &str = "
.visible .entry pp_fake_fill(.param .u64 to, .param .u64 bytes, .param .u64 n) {}
.visible .entry pp_fake_check(.param .u64 from, .param .u64 bytes, .param .u64 n, .param .u64 wrong) {}
.visible .entry pp_fake_copy(.param .u64 to, .param .u64 from, .param .u64 bytes) {}
.visible .entry pp_fake_spin(.param .u64 microseconds) {}
";

/// The kernels that write and check payloads on a device.
#[derive(Debug)]
pub struct TestKernels {
    fill: u64,
    check: u64,
    copy: u64,
    spin: u64,
}

impl TestKernels {
    /// Loads them into the context that is current on this thread.
    pub fn load() -> Self {
        let mut module = std::ptr::null_mut();
        let text = CString::new(PTX).unwrap();
        ok!(module_load(&mut module, text.as_ptr()));
        let function = |name: &str| {
            let (mut function, name) = (std::ptr::null_mut(), CString::new(name).unwrap());
            ok!(module_function(&mut function, module, name.as_ptr()));
            function as u64
        };
        Self {
            fill: function("pp_fake_fill"),
            check: function("pp_fake_check"),
            copy: function("pp_fake_copy"),
            spin: function("pp_fake_spin"),
        }
    }

    fn launch(function: u64, stream: u64, arguments: &[u64]) {
        let mut arguments = arguments.to_vec();
        let mut pointers: Vec<*mut c_void> = arguments
            .iter_mut()
            .map(|a| std::ptr::from_mut(a).cast())
            .collect();
        let null = std::ptr::null_mut();
        ok!(launch(
            function as Handle,
            1,
            1,
            1,
            32,
            1,
            1,
            0,
            stream as Handle,
            pointers.as_mut_ptr(),
            null
        ));
    }

    /// Writes payload `n`: `pattern(n, i)` at byte `i`.
    pub fn fill(&self, stream: u64, to: u64, bytes: usize, n: u64) {
        Self::launch(self.fill, stream, &[to, bytes as u64, n]);
    }
    /// Adds to the `u64` at `wrong` how many bytes differ from payload `n`.
    pub fn check(&self, stream: u64, from: u64, bytes: usize, n: u64, wrong: u64) {
        Self::launch(self.check, stream, &[from, bytes as u64, n, wrong]);
    }
    /// Copies, as a stage would.
    pub fn copy(&self, stream: u64, to: u64, from: u64, bytes: usize) {
        Self::launch(self.copy, stream, &[to, from, bytes as u64]);
    }
    /// Takes time.
    pub fn spin(&self, stream: u64, microseconds: u64) {
        Self::launch(self.spin, stream, &[microseconds]);
    }
}
