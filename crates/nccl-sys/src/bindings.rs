//! What this project needs of NCCL 2.28.9, from its header `nccl.h`.
//!
//! Made by `cargo xtask nccl-bindings`; changes by hand are lost.

pub const NCCL_MAJOR: u32 = 2;
pub const NCCL_VERSION_CODE: u32 = 22809;
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
pub struct Symbols {
    __library: ::libloading::Library,
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
    pub ncclGetErrorString: Result<
        unsafe extern "C" fn(result: ncclResult_t) -> *const ::core::ffi::c_char,
        ::libloading::Error,
    >,
    pub ncclGetLastError: Result<
        unsafe extern "C" fn(comm: ncclComm_t) -> *const ::core::ffi::c_char,
        ::libloading::Error,
    >,
    pub ncclCommGetAsyncError: Result<
        unsafe extern "C" fn(
            comm: ncclComm_t,
            asyncError: *mut ncclResult_t,
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
}
crate::table::table! {
    Symbols:
    ncclGetVersion
    ncclGetUniqueId
    ncclCommInitRankConfig
    ncclCommFinalize
    ncclCommDestroy
    ncclCommAbort
    ncclCommRevoke
    ncclGetErrorString
    ncclGetLastError
    ncclCommGetAsyncError
    ncclBroadcast
    ncclAllReduce
    ncclSend
    ncclRecv
    ncclGroupStart
    ncclGroupEnd
}
