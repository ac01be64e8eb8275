//! The functions that this project calls, as plain pointers. The generated table has these alone.

use std::ffi::{c_char, c_int, c_void};

use crate::bindings::{
    Symbols, cudaStream_t, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclResult_t,
    ncclUniqueId,
};
use crate::error::Reason;

/// One field for each function, and how the fields are filled. The types are written out, and the compiler compares them
/// with those of the generated table.
macro_rules! functions {
    (
        required { $($required:ident: fn($($in:ty),*) -> $out:ty;)* }
        optional { $($optional:ident: fn($($opt_in:ty),*) -> $opt_out:ty;)* }
    ) => {
        /// Pointers into a library that is never unloaded. The documentation of each is `nccl.h`; calling one is `unsafe`.
        ///
        /// An `Option` is `None` when the library is too old for the function.
        #[expect(missing_docs, non_snake_case, reason = "the names of nccl.h")]
        #[derive(Debug, Clone, Copy)]
        pub struct Functions {
            $(pub $required: unsafe extern "C" fn($($in),*) -> $out,)*
            $(pub $optional: Option<unsafe extern "C" fn($($opt_in),*) -> $opt_out>,)*
        }

        impl Functions {
            pub(crate) fn of(symbols: &Symbols) -> Result<Functions, Reason> {
                Ok(Functions {
                    $($required: *symbols.$required.as_ref().map_err(|_| Reason::NoSymbol {
                        symbol: stringify!($required),
                    })?,)*
                    $($optional: symbols.$optional.as_ref().ok().copied(),)*
                })
            }
        }
    };
}

functions! {
    required {
        ncclGetVersion: fn(*mut c_int) -> ncclResult_t;
        ncclGetUniqueId: fn(*mut ncclUniqueId) -> ncclResult_t;
        ncclGetErrorString: fn(ncclResult_t) -> *const c_char;
        ncclGetLastError: fn(ncclComm_t) -> *const c_char;
        ncclCommInitRankConfig: fn(*mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut ncclConfig_t) -> ncclResult_t;
        ncclCommFinalize: fn(ncclComm_t) -> ncclResult_t;
        ncclCommDestroy: fn(ncclComm_t) -> ncclResult_t;
        ncclCommAbort: fn(ncclComm_t) -> ncclResult_t;
        ncclCommGetAsyncError: fn(ncclComm_t, *mut ncclResult_t) -> ncclResult_t;
        ncclGroupStart: fn() -> ncclResult_t;
        ncclGroupEnd: fn() -> ncclResult_t;
        ncclSend: fn(*const c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t) -> ncclResult_t;
        ncclRecv: fn(*mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t) -> ncclResult_t;
        ncclAllReduce: fn(
            *const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t
        ) -> ncclResult_t;
        ncclBroadcast: fn(
            *const c_void, *mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t
        ) -> ncclResult_t;
    }
    optional {
        ncclCommRevoke: fn(ncclComm_t, c_int) -> ncclResult_t;
    }
}
