//! The types, constants and functions of NCCL 2.28.9, from its header `nccl.h`.
//!
//! Made by `cargo xtask nccl-bindings`; changes by hand are lost.

pub const NCCL_MAJOR: u32 = 2;
pub const NCCL_MINOR: u32 = 28;
pub const NCCL_PATCH: u32 = 9;
pub const NCCL_SUFFIX: &[u8; 1] = b"\0";
pub const NCCL_VERSION_CODE: u32 = 22809;
pub const NCCL_UNIQUE_ID_BYTES: u32 = 128;
pub const NCCL_SPLIT_NOCOLOR: i32 = -1;
pub const NCCL_UNDEF_FLOAT: f64 = -1.0;
pub const NCCL_WIN_DEFAULT: u32 = 0;
pub const NCCL_WIN_COLL_SYMMETRIC: u32 = 1;
pub const NCCL_WIN_REQUIRED_ALIGNMENT: u32 = 4096;
pub const NCCL_CTA_POLICY_DEFAULT: u32 = 0;
pub const NCCL_CTA_POLICY_EFFICIENCY: u32 = 1;
pub const NCCL_CTA_POLICY_ZERO: u32 = 2;
pub const NCCL_SHRINK_DEFAULT: u32 = 0;
pub const NCCL_SHRINK_ABORT: u32 = 1;
pub const NCCL_REVOKE_DEFAULT: u32 = 0;
#[repr(C)]
#[derive(Debug)]
pub struct CUstream_st {
    _unused: [u8; 0],
}
pub type cudaStream_t = *mut CUstream_st;
#[repr(C)]
#[derive(Debug)]
pub struct ncclComm {
    _unused: [u8; 0],
}
pub type ncclComm_t = *mut ncclComm;
#[repr(C)]
#[derive(Debug)]
pub struct ncclWindow_vidmem {
    _unused: [u8; 0],
}
pub type ncclWindow_t = *mut ncclWindow_vidmem;
#[repr(C)]
#[derive(Copy, Clone)]
pub struct ncclUniqueId {
    pub internal: [::core::ffi::c_char; 128usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ncclUniqueId"][::core::mem::size_of::<ncclUniqueId>() - 128usize];
    ["Alignment of ncclUniqueId"][::core::mem::align_of::<ncclUniqueId>() - 1usize];
    [
        "Offset of field: ncclUniqueId::internal",
    ][::core::mem::offset_of!(ncclUniqueId, internal) - 0usize];
};
impl ncclResult_t {
    pub const ncclSuccess: ncclResult_t = ncclResult_t(0);
    pub const ncclUnhandledCudaError: ncclResult_t = ncclResult_t(1);
    pub const ncclSystemError: ncclResult_t = ncclResult_t(2);
    pub const ncclInternalError: ncclResult_t = ncclResult_t(3);
    pub const ncclInvalidArgument: ncclResult_t = ncclResult_t(4);
    pub const ncclInvalidUsage: ncclResult_t = ncclResult_t(5);
    pub const ncclRemoteError: ncclResult_t = ncclResult_t(6);
    pub const ncclInProgress: ncclResult_t = ncclResult_t(7);
    pub const ncclNumResults: ncclResult_t = ncclResult_t(8);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclResult_t(pub ::core::ffi::c_uint);
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclConfig_v22800 {
    pub size: usize,
    pub magic: ::core::ffi::c_uint,
    pub version: ::core::ffi::c_uint,
    pub blocking: ::core::ffi::c_int,
    pub cgaClusterSize: ::core::ffi::c_int,
    pub minCTAs: ::core::ffi::c_int,
    pub maxCTAs: ::core::ffi::c_int,
    pub netName: *const ::core::ffi::c_char,
    pub splitShare: ::core::ffi::c_int,
    pub trafficClass: ::core::ffi::c_int,
    pub commName: *const ::core::ffi::c_char,
    pub collnetEnable: ::core::ffi::c_int,
    pub CTAPolicy: ::core::ffi::c_int,
    pub shrinkShare: ::core::ffi::c_int,
    pub nvlsCTAs: ::core::ffi::c_int,
    pub nChannelsPerNetPeer: ::core::ffi::c_int,
    pub nvlinkCentricSched: ::core::ffi::c_int,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of ncclConfig_v22800"][::core::mem::size_of::<ncclConfig_v22800>() - 80usize];
    [
        "Alignment of ncclConfig_v22800",
    ][::core::mem::align_of::<ncclConfig_v22800>() - 8usize];
    [
        "Offset of field: ncclConfig_v22800::size",
    ][::core::mem::offset_of!(ncclConfig_v22800, size) - 0usize];
    [
        "Offset of field: ncclConfig_v22800::magic",
    ][::core::mem::offset_of!(ncclConfig_v22800, magic) - 8usize];
    [
        "Offset of field: ncclConfig_v22800::version",
    ][::core::mem::offset_of!(ncclConfig_v22800, version) - 12usize];
    [
        "Offset of field: ncclConfig_v22800::blocking",
    ][::core::mem::offset_of!(ncclConfig_v22800, blocking) - 16usize];
    [
        "Offset of field: ncclConfig_v22800::cgaClusterSize",
    ][::core::mem::offset_of!(ncclConfig_v22800, cgaClusterSize) - 20usize];
    [
        "Offset of field: ncclConfig_v22800::minCTAs",
    ][::core::mem::offset_of!(ncclConfig_v22800, minCTAs) - 24usize];
    [
        "Offset of field: ncclConfig_v22800::maxCTAs",
    ][::core::mem::offset_of!(ncclConfig_v22800, maxCTAs) - 28usize];
    [
        "Offset of field: ncclConfig_v22800::netName",
    ][::core::mem::offset_of!(ncclConfig_v22800, netName) - 32usize];
    [
        "Offset of field: ncclConfig_v22800::splitShare",
    ][::core::mem::offset_of!(ncclConfig_v22800, splitShare) - 40usize];
    [
        "Offset of field: ncclConfig_v22800::trafficClass",
    ][::core::mem::offset_of!(ncclConfig_v22800, trafficClass) - 44usize];
    [
        "Offset of field: ncclConfig_v22800::commName",
    ][::core::mem::offset_of!(ncclConfig_v22800, commName) - 48usize];
    [
        "Offset of field: ncclConfig_v22800::collnetEnable",
    ][::core::mem::offset_of!(ncclConfig_v22800, collnetEnable) - 56usize];
    [
        "Offset of field: ncclConfig_v22800::CTAPolicy",
    ][::core::mem::offset_of!(ncclConfig_v22800, CTAPolicy) - 60usize];
    [
        "Offset of field: ncclConfig_v22800::shrinkShare",
    ][::core::mem::offset_of!(ncclConfig_v22800, shrinkShare) - 64usize];
    [
        "Offset of field: ncclConfig_v22800::nvlsCTAs",
    ][::core::mem::offset_of!(ncclConfig_v22800, nvlsCTAs) - 68usize];
    [
        "Offset of field: ncclConfig_v22800::nChannelsPerNetPeer",
    ][::core::mem::offset_of!(ncclConfig_v22800, nChannelsPerNetPeer) - 72usize];
    [
        "Offset of field: ncclConfig_v22800::nvlinkCentricSched",
    ][::core::mem::offset_of!(ncclConfig_v22800, nvlinkCentricSched) - 76usize];
};
pub type ncclConfig_t = ncclConfig_v22800;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ncclSimInfo_v22200 {
    pub size: usize,
    pub magic: ::core::ffi::c_uint,
    pub version: ::core::ffi::c_uint,
    pub estimatedTime: f32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of ncclSimInfo_v22200",
    ][::core::mem::size_of::<ncclSimInfo_v22200>() - 24usize];
    [
        "Alignment of ncclSimInfo_v22200",
    ][::core::mem::align_of::<ncclSimInfo_v22200>() - 8usize];
    [
        "Offset of field: ncclSimInfo_v22200::size",
    ][::core::mem::offset_of!(ncclSimInfo_v22200, size) - 0usize];
    [
        "Offset of field: ncclSimInfo_v22200::magic",
    ][::core::mem::offset_of!(ncclSimInfo_v22200, magic) - 8usize];
    [
        "Offset of field: ncclSimInfo_v22200::version",
    ][::core::mem::offset_of!(ncclSimInfo_v22200, version) - 12usize];
    [
        "Offset of field: ncclSimInfo_v22200::estimatedTime",
    ][::core::mem::offset_of!(ncclSimInfo_v22200, estimatedTime) - 16usize];
};
pub type ncclSimInfo_t = ncclSimInfo_v22200;
impl ncclRedOp_dummy_t {
    pub const ncclNumOps_dummy: ncclRedOp_dummy_t = ncclRedOp_dummy_t(5);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclRedOp_dummy_t(pub ::core::ffi::c_uint);
impl ncclRedOp_t {
    pub const ncclSum: ncclRedOp_t = ncclRedOp_t(0);
    pub const ncclProd: ncclRedOp_t = ncclRedOp_t(1);
    pub const ncclMax: ncclRedOp_t = ncclRedOp_t(2);
    pub const ncclMin: ncclRedOp_t = ncclRedOp_t(3);
    pub const ncclAvg: ncclRedOp_t = ncclRedOp_t(4);
    pub const ncclNumOps: ncclRedOp_t = ncclRedOp_t(5);
    pub const ncclMaxRedOp: ncclRedOp_t = ncclRedOp_t(2147483647);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclRedOp_t(pub ::core::ffi::c_uint);
impl ncclDataType_t {
    pub const ncclInt8: ncclDataType_t = ncclDataType_t(0);
    pub const ncclChar: ncclDataType_t = ncclDataType_t(0);
    pub const ncclUint8: ncclDataType_t = ncclDataType_t(1);
    pub const ncclInt32: ncclDataType_t = ncclDataType_t(2);
    pub const ncclInt: ncclDataType_t = ncclDataType_t(2);
    pub const ncclUint32: ncclDataType_t = ncclDataType_t(3);
    pub const ncclInt64: ncclDataType_t = ncclDataType_t(4);
    pub const ncclUint64: ncclDataType_t = ncclDataType_t(5);
    pub const ncclFloat16: ncclDataType_t = ncclDataType_t(6);
    pub const ncclHalf: ncclDataType_t = ncclDataType_t(6);
    pub const ncclFloat32: ncclDataType_t = ncclDataType_t(7);
    pub const ncclFloat: ncclDataType_t = ncclDataType_t(7);
    pub const ncclFloat64: ncclDataType_t = ncclDataType_t(8);
    pub const ncclDouble: ncclDataType_t = ncclDataType_t(8);
    pub const ncclBfloat16: ncclDataType_t = ncclDataType_t(9);
    pub const ncclFloat8e4m3: ncclDataType_t = ncclDataType_t(10);
    pub const ncclFloat8e5m2: ncclDataType_t = ncclDataType_t(11);
    pub const ncclNumTypes: ncclDataType_t = ncclDataType_t(12);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclDataType_t(pub ::core::ffi::c_uint);
impl ncclScalarResidence_t {
    pub const ncclScalarDevice: ncclScalarResidence_t = ncclScalarResidence_t(0);
    pub const ncclScalarHostImmediate: ncclScalarResidence_t = ncclScalarResidence_t(1);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct ncclScalarResidence_t(pub ::core::ffi::c_uint);
pub struct Symbols {
    __library: ::libloading::Library,
    pub ncclMemAlloc: Result<
        unsafe extern "C" fn(
            ptr: *mut *mut ::core::ffi::c_void,
            size: usize,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclMemFree: Result<
        unsafe extern "C" fn(ptr: *mut ::core::ffi::c_void) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclGetVersion: Result<
        unsafe extern "C" fn(version: *mut ::core::ffi::c_int) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclGetUniqueId: Result<
        unsafe extern "C" fn(uniqueId: *mut ncclUniqueId) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommInitRankConfig: Result<
        unsafe extern "C" fn(
            comm: *mut ncclComm_t,
            nranks: ::core::ffi::c_int,
            commId: ncclUniqueId,
            rank: ::core::ffi::c_int,
            config: *mut ncclConfig_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommInitRank: Result<
        unsafe extern "C" fn(
            comm: *mut ncclComm_t,
            nranks: ::core::ffi::c_int,
            commId: ncclUniqueId,
            rank: ::core::ffi::c_int,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommInitAll: Result<
        unsafe extern "C" fn(
            comm: *mut ncclComm_t,
            ndev: ::core::ffi::c_int,
            devlist: *const ::core::ffi::c_int,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommFinalize: Result<
        unsafe extern "C" fn(comm: ncclComm_t) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommDestroy: Result<
        unsafe extern "C" fn(comm: ncclComm_t) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommAbort: Result<
        unsafe extern "C" fn(comm: ncclComm_t) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommRevoke: Result<
        unsafe extern "C" fn(
            comm: ncclComm_t,
            revokeFlags: ::core::ffi::c_int,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommSplit: Result<
        unsafe extern "C" fn(
            comm: ncclComm_t,
            color: ::core::ffi::c_int,
            key: ::core::ffi::c_int,
            newcomm: *mut ncclComm_t,
            config: *mut ncclConfig_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommShrink: Result<
        unsafe extern "C" fn(
            comm: ncclComm_t,
            excludeRanksList: *mut ::core::ffi::c_int,
            excludeRanksCount: ::core::ffi::c_int,
            newcomm: *mut ncclComm_t,
            config: *mut ncclConfig_t,
            shrinkFlags: ::core::ffi::c_int,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommInitRankScalable: Result<
        unsafe extern "C" fn(
            newcomm: *mut ncclComm_t,
            nranks: ::core::ffi::c_int,
            myrank: ::core::ffi::c_int,
            nId: ::core::ffi::c_int,
            commIds: *mut ncclUniqueId,
            config: *mut ncclConfig_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclGetErrorString: Result<
        unsafe extern "C" fn(result: ncclResult_t) -> *const ::core::ffi::c_char,
        ::libloading::Error,
    >,
    pub ncclGetLastError: Result<
        unsafe extern "C" fn(comm: ncclComm_t) -> *const ::core::ffi::c_char,
        ::libloading::Error,
    >,
    pub ncclResetDebugInit: Result<unsafe extern "C" fn(), ::libloading::Error>,
    pub ncclCommGetAsyncError: Result<
        unsafe extern "C" fn(
            comm: ncclComm_t,
            asyncError: *mut ncclResult_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommCount: Result<
        unsafe extern "C" fn(
            comm: ncclComm_t,
            count: *mut ::core::ffi::c_int,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommCuDevice: Result<
        unsafe extern "C" fn(
            comm: ncclComm_t,
            device: *mut ::core::ffi::c_int,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommUserRank: Result<
        unsafe extern "C" fn(
            comm: ncclComm_t,
            rank: *mut ::core::ffi::c_int,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommRegister: Result<
        unsafe extern "C" fn(
            comm: ncclComm_t,
            buff: *mut ::core::ffi::c_void,
            size: usize,
            handle: *mut *mut ::core::ffi::c_void,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommDeregister: Result<
        unsafe extern "C" fn(
            comm: ncclComm_t,
            handle: *mut ::core::ffi::c_void,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommWindowRegister: Result<
        unsafe extern "C" fn(
            comm: ncclComm_t,
            buff: *mut ::core::ffi::c_void,
            size: usize,
            win: *mut ncclWindow_t,
            winFlags: ::core::ffi::c_int,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclCommWindowDeregister: Result<
        unsafe extern "C" fn(comm: ncclComm_t, win: ncclWindow_t) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclRedOpCreatePreMulSum: Result<
        unsafe extern "C" fn(
            op: *mut ncclRedOp_t,
            scalar: *mut ::core::ffi::c_void,
            datatype: ncclDataType_t,
            residence: ncclScalarResidence_t,
            comm: ncclComm_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclRedOpDestroy: Result<
        unsafe extern "C" fn(op: ncclRedOp_t, comm: ncclComm_t) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclReduce: Result<
        unsafe extern "C" fn(
            sendbuff: *const ::core::ffi::c_void,
            recvbuff: *mut ::core::ffi::c_void,
            count: usize,
            datatype: ncclDataType_t,
            op: ncclRedOp_t,
            root: ::core::ffi::c_int,
            comm: ncclComm_t,
            stream: cudaStream_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclBcast: Result<
        unsafe extern "C" fn(
            buff: *mut ::core::ffi::c_void,
            count: usize,
            datatype: ncclDataType_t,
            root: ::core::ffi::c_int,
            comm: ncclComm_t,
            stream: cudaStream_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclBroadcast: Result<
        unsafe extern "C" fn(
            sendbuff: *const ::core::ffi::c_void,
            recvbuff: *mut ::core::ffi::c_void,
            count: usize,
            datatype: ncclDataType_t,
            root: ::core::ffi::c_int,
            comm: ncclComm_t,
            stream: cudaStream_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclAllReduce: Result<
        unsafe extern "C" fn(
            sendbuff: *const ::core::ffi::c_void,
            recvbuff: *mut ::core::ffi::c_void,
            count: usize,
            datatype: ncclDataType_t,
            op: ncclRedOp_t,
            comm: ncclComm_t,
            stream: cudaStream_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclReduceScatter: Result<
        unsafe extern "C" fn(
            sendbuff: *const ::core::ffi::c_void,
            recvbuff: *mut ::core::ffi::c_void,
            recvcount: usize,
            datatype: ncclDataType_t,
            op: ncclRedOp_t,
            comm: ncclComm_t,
            stream: cudaStream_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclAllGather: Result<
        unsafe extern "C" fn(
            sendbuff: *const ::core::ffi::c_void,
            recvbuff: *mut ::core::ffi::c_void,
            sendcount: usize,
            datatype: ncclDataType_t,
            comm: ncclComm_t,
            stream: cudaStream_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclAlltoAll: Result<
        unsafe extern "C" fn(
            sendbuff: *const ::core::ffi::c_void,
            recvbuff: *mut ::core::ffi::c_void,
            count: usize,
            datatype: ncclDataType_t,
            comm: ncclComm_t,
            stream: cudaStream_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclGather: Result<
        unsafe extern "C" fn(
            sendbuff: *const ::core::ffi::c_void,
            recvbuff: *mut ::core::ffi::c_void,
            count: usize,
            datatype: ncclDataType_t,
            root: ::core::ffi::c_int,
            comm: ncclComm_t,
            stream: cudaStream_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclScatter: Result<
        unsafe extern "C" fn(
            sendbuff: *const ::core::ffi::c_void,
            recvbuff: *mut ::core::ffi::c_void,
            count: usize,
            datatype: ncclDataType_t,
            root: ::core::ffi::c_int,
            comm: ncclComm_t,
            stream: cudaStream_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclSend: Result<
        unsafe extern "C" fn(
            sendbuff: *const ::core::ffi::c_void,
            count: usize,
            datatype: ncclDataType_t,
            peer: ::core::ffi::c_int,
            comm: ncclComm_t,
            stream: cudaStream_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclRecv: Result<
        unsafe extern "C" fn(
            recvbuff: *mut ::core::ffi::c_void,
            count: usize,
            datatype: ncclDataType_t,
            peer: ::core::ffi::c_int,
            comm: ncclComm_t,
            stream: cudaStream_t,
        ) -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclGroupStart: Result<
        unsafe extern "C" fn() -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclGroupEnd: Result<
        unsafe extern "C" fn() -> ncclResult_t,
        ::libloading::Error,
    >,
    pub ncclGroupSimulateEnd: Result<
        unsafe extern "C" fn(simInfo: *mut ncclSimInfo_t) -> ncclResult_t,
        ::libloading::Error,
    >,
}
crate::table::table! {
    Symbols:
    ncclMemAlloc
    ncclMemFree
    ncclGetVersion
    ncclGetUniqueId
    ncclCommInitRankConfig
    ncclCommInitRank
    ncclCommInitAll
    ncclCommFinalize
    ncclCommDestroy
    ncclCommAbort
    ncclCommRevoke
    ncclCommSplit
    ncclCommShrink
    ncclCommInitRankScalable
    ncclGetErrorString
    ncclGetLastError
    ncclResetDebugInit
    ncclCommGetAsyncError
    ncclCommCount
    ncclCommCuDevice
    ncclCommUserRank
    ncclCommRegister
    ncclCommDeregister
    ncclCommWindowRegister
    ncclCommWindowDeregister
    ncclRedOpCreatePreMulSum
    ncclRedOpDestroy
    ncclReduce
    ncclBcast
    ncclBroadcast
    ncclAllReduce
    ncclReduceScatter
    ncclAllGather
    ncclAlltoAll
    ncclGather
    ncclScatter
    ncclSend
    ncclRecv
    ncclGroupStart
    ncclGroupEnd
    ncclGroupSimulateEnd
}
