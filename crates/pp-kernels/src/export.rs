//! The plugin side: two safe traits, and the functions that put them behind the table.
//!
//! Hazard: a panic that crosses an `extern "C"` function aborts the process, and a caller's lying length is read as
//! memory. So every entry runs in `catch_unwind` and turns a panic into a status, and every struct's size, pointer and
//! count is checked before it becomes a slice. The traits themselves see only slices and values.

use std::any::Any;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};

use pp_contract::{Manifest, VideoPlanParts};

use crate::abi::{self, OpaqueSession, Table, TableHead};
use crate::config::{ChunkShape, Description, Layout, SessionConfig, Space};
use crate::convert::{self, RawTensors};
use crate::error::{Failure, Status};
use crate::frame::{Frame, FrameView, FrameViewMut, Plane};
use crate::payload::{HostMut, Payload, PayloadMut, TensorsIn};

/// A set of kernels, as its author writes it. Put it behind the C table with [`crate::export_kernels!`].
pub trait Kernels: 'static {
    /// The state of one stream.
    type Session: Session;

    /// What the kernels are.
    fn describe() -> Description;

    /// Makes a session; `config` is within its ranges.
    ///
    /// # Errors
    /// A size, format or memory space that is not served.
    fn create(config: &SessionConfig) -> Result<Self::Session, Failure>;

    /// A quick check that the kernels compute what they should on this machine.
    ///
    /// # Errors
    /// What differs.
    fn self_test() -> Result<(), Failure> {
        Ok(())
    }
}

/// One stream. Calls never overlap; each may come from another thread.
///
/// Frames have the session's planes and sizes; plans are valid. Tensors must be asked for by name, type and shape,
/// which refuses what does not fit. In a session on host memory they are slices ([`Payload::tensor`]); in one on a
/// CUDA device they are addresses ([`Payload::device_tensor`]), the context is current, and calls only enqueue work on
/// the session's stream: payloads and samples stay as they are until the stream has passed the call.
pub trait Session: Send {
    /// The tensors of a chunk.
    ///
    /// # Errors
    /// A shape that is not served.
    fn layout(&self, shape: ChunkShape) -> Result<Layout, Failure>;

    /// Frames to input tensors. Every byte of every tensor must be written.
    ///
    /// # Errors
    /// What could not be done.
    fn encode(
        &mut self,
        frames: &[FrameView<'_>],
        plan: &VideoPlanParts,
        input: &mut PayloadMut<'_>,
    ) -> Result<(), Failure>;

    /// Input tensors to output tensors; gives the number of generator calls made. With zero steps the output is the
    /// input, bit for bit.
    ///
    /// # Errors
    /// What could not be done.
    fn phase_b(
        &mut self,
        plan: &VideoPlanParts,
        input: &Payload<'_>,
        output: &mut PayloadMut<'_>,
    ) -> Result<u32, Failure>;

    /// Output tensors to frames. Every sample must be written.
    ///
    /// # Errors
    /// What could not be done.
    fn decode(
        &mut self,
        plan: &VideoPlanParts,
        output: &Payload<'_>,
        frames: &mut [FrameViewMut<'_>],
    ) -> Result<(), Failure>;
}

/// Exports the kernels of a type that implements [`Kernels`] as `pp_kernels_entry_v1`, once in a `cdylib`.
#[macro_export]
macro_rules! export_kernels {
    ($kernels:ty) => {
        /// The entry symbol of the plugin ABI.
        #[unsafe(no_mangle)]
        pub extern "C" fn pp_kernels_entry_v1() -> *const $crate::abi::Table {
            static TABLE: $crate::abi::Table = $crate::export::table::<$kernels>();
            &raw const TABLE
        }
    };
}

/// The table of a set of kernels.
#[must_use]
pub const fn table<K: Kernels>() -> Table {
    Table {
        head: TableHead {
            magic: abi::MAGIC,
            struct_size: abi::size::<Table>(),
            major: abi::MAJOR,
            minor: abi::MINOR,
        },
        describe: Some(describe::<K>),
        create: Some(create::<K>),
        destroy: Some(destroy::<K>),
        layout: Some(call::<K, abi::LayoutArgs>),
        encode: Some(call::<K, abi::EncodeArgs>),
        phase_b: Some(call::<K, abi::PhaseBArgs>),
        decode: Some(call::<K, abi::DecodeArgs>),
        self_test: Some(self_test::<K>),
    }
}

/// A session and what it was made for.
struct Held<S> {
    session: S,
    config: SessionConfig,
}

unsafe extern "C" fn describe<K: Kernels>(
    out: *mut abi::Description,
    error: *mut abi::ErrorText,
) -> u32 {
    // SAFETY: the pointers are valid for the call by the rules of the ABI.
    unsafe {
        guarded(error, || {
            sized(out)?;
            K::describe().to_abi(&mut *out);
            Ok(())
        })
    }
}

unsafe extern "C" fn create<K: Kernels>(
    config: *const abi::SessionConfig,
    out: *mut *mut OpaqueSession,
    error: *mut abi::ErrorText,
) -> u32 {
    // SAFETY: the pointers are valid for the call by the rules of the ABI.
    unsafe {
        guarded(error, || {
            let config = SessionConfig::from_abi(sized(config)?)?;
            let session = K::create(&config)?;
            *out = Box::into_raw(Box::new(Held { session, config })).cast();
            Ok(())
        })
    }
}

unsafe extern "C" fn destroy<K: Kernels>(session: *mut OpaqueSession) {
    if session.is_null() {
        return;
    }
    // SAFETY: the pointer came from `create` of this table and is given back once.
    let held = unsafe { Box::from_raw(session.cast::<Held<K::Session>>()) };
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| drop(held))) {
        // A destructor has no one to tell; this only disposes of the payload.
        panic_text(payload);
    }
}

/// The arguments of an entry that works on a session.
trait Call {
    /// # Safety
    /// The pointers in the arguments are valid for the call by the rules of the ABI. Until the call returns nothing else
    /// uses what it writes, and nothing writes what it reads.
    unsafe fn run<S: Session>(&mut self, held: &mut Held<S>) -> Result<(), Failure>;
}

unsafe extern "C" fn call<K: Kernels, A: Call>(
    session: *mut OpaqueSession,
    args: *mut A,
    error: *mut abi::ErrorText,
) -> u32 {
    // SAFETY: the pointers are valid for the call by the rules of the ABI. The session came from `create` of this table
    // and is not yet destroyed, and nothing else uses it or the arguments until the call returns.
    unsafe {
        guarded(error, || {
            sized(args)?;
            (*args).run(&mut *session.cast::<Held<K::Session>>())
        })
    }
}

impl Call for abi::LayoutArgs {
    unsafe fn run<S: Session>(&mut self, held: &mut Held<S>) -> Result<(), Failure> {
        let layout = held.session.layout(ChunkShape {
            frames: self.frames,
            steps: self.steps,
            context_frames: self.context_frames,
        })?;
        let write = |list: &Manifest, out: *mut abi::Tensor| {
            let count = list.len();
            if count > self.capacity as usize {
                return Err(Failure::invalid(format!("no room for {count} tensors")));
            }
            let raw = RawTensors::new(list)?;
            // SAFETY: the array holds `capacity` elements (the caller's duty).
            unsafe { std::ptr::copy_nonoverlapping(raw.as_slice().as_ptr(), out, count) };
            Ok(count as u32)
        };
        self.input_count = write(&layout.inputs, self.inputs)?;
        self.output_count = write(&layout.outputs, self.outputs)?;
        Ok(())
    }
}

impl Call for abi::EncodeArgs {
    unsafe fn run<S: Session>(&mut self, held: &mut Held<S>) -> Result<(), Failure> {
        // SAFETY: the caller's duty.
        unsafe {
            let plan = plan(self.plan)?;
            let frames = frames(self.frames, self.frame_count, &held.config, shared)?;
            let mut input = payload(self.input, &held.config, unguarded)?;
            held.session.encode(&frames, &plan, &mut input)
        }
    }
}

impl Call for abi::PhaseBArgs {
    unsafe fn run<S: Session>(&mut self, held: &mut Held<S>) -> Result<(), Failure> {
        // SAFETY: the caller's duty; by the rules of the ABI input and output do not overlap.
        unsafe {
            let plan = plan(self.plan)?;
            let input = payload(self.input, &held.config, shared)?;
            let mut output = payload(self.output, &held.config, unguarded)?;
            self.observed_generator_calls = held.session.phase_b(&plan, &input, &mut output)?;
            Ok(())
        }
    }
}

impl Call for abi::DecodeArgs {
    unsafe fn run<S: Session>(&mut self, held: &mut Held<S>) -> Result<(), Failure> {
        // SAFETY: the caller's duty.
        unsafe {
            let plan = plan(self.plan)?;
            let mut frames = frames(self.frames, self.frame_count, &held.config, exclusive)?;
            let output = payload(self.output, &held.config, shared)?;
            held.session.decode(&plan, &output, &mut frames)
        }
    }
}

unsafe extern "C" fn self_test<K: Kernels>(error: *mut abi::ErrorText) -> u32 {
    // SAFETY: the pointer is valid for the call by the rules of the ABI.
    unsafe { guarded(error, K::self_test) }
}

/// Runs one entry: a failure and a panic become a status and a text.
///
/// # Safety
/// `error` is null or valid for the call.
unsafe fn guarded(error: *mut abi::ErrorText, body: impl FnOnce() -> Result<(), Failure>) -> u32 {
    // Unwind safety: after a panic the host only destroys the session.
    let failure = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return abi::OK,
        Ok(Err(failure)) => failure,
        Err(payload) => Failure {
            status: Status::Panic,
            message: panic_text(payload),
        },
    };
    // SAFETY: the caller's duty.
    unsafe { write_error(error, &failure.message) };
    failure.status.code()
}

/// The text of a panic. A payload of another type is forgotten: dropping it could panic again.
fn panic_text(payload: Box<dyn Any + Send>) -> String {
    let payload = match payload.downcast::<String>() {
        Ok(text) => return *text,
        Err(payload) => payload,
    };
    match payload.downcast::<&str>() {
        Ok(text) => (*text).to_owned(),
        Err(payload) => {
            std::mem::forget(payload);
            "a panic without a text".to_owned()
        }
    }
}

/// # Safety
/// `error` is null, or valid and with `capacity` writable bytes at `text`.
unsafe fn write_error(error: *mut abi::ErrorText, message: &str) {
    // SAFETY: the caller's duty; the size is read first and covers what is used.
    unsafe {
        if error.is_null() || (*error).struct_size < abi::size::<abi::ErrorText>() {
            return;
        }
        let error = &mut *error;
        let capacity = usize::try_from(error.capacity).unwrap_or(0);
        let length = if error.text.is_null() {
            0
        } else {
            message.len().min(capacity)
        };
        if length > 0 {
            std::ptr::copy_nonoverlapping(message.as_ptr(), error.text, length);
        }
        error.length = length as u64;
    }
}

/// Refuses a struct that is shorter than version 1.0 has it. Later versions append only.
///
/// # Safety
/// `raw` points to a struct of the ABI that begins with its `struct_size`, and is valid for as long as the result lives.
unsafe fn sized<'a, T>(raw: *const T) -> Result<&'a T, Failure> {
    // SAFETY: the caller's duty; the size is read first.
    let struct_size = unsafe { *raw.cast::<u32>() };
    if struct_size < abi::size::<T>() {
        return Err(Failure::invalid(format!(
            "a struct of {struct_size} bytes, this plugin needs {}",
            abi::size::<T>()
        )));
    }
    // SAFETY: as above, and the struct is as long as its type.
    Ok(unsafe { &*raw })
}

/// # Safety
/// `raw` is valid for the call.
unsafe fn plan(raw: *const abi::Plan) -> Result<VideoPlanParts, Failure> {
    // SAFETY: the caller's duty.
    convert::plan(unsafe { sized(raw) }?)
}

/// The tensors of a payload, each checked to lie within it.
///
/// # Safety
/// `raw` is valid for the call, with `tensor_count` tensors and `bytes` bytes behind its pointers.
unsafe fn tensors(raw: *const abi::Payload) -> Result<(Manifest, *mut u8, usize), Failure> {
    // SAFETY: the caller's duty.
    let raw = unsafe { sized(raw) }?;
    if raw.tensor_count as usize > abi::MAX_TENSORS {
        return Err(Failure::invalid(format!(
            "{} tensors in a payload",
            raw.tensor_count
        )));
    }
    let tensors: &[abi::Tensor] = if raw.tensor_count == 0 {
        &[]
    } else {
        // SAFETY: the caller's duty; the count was bounded above.
        unsafe { std::slice::from_raw_parts(raw.tensors, raw.tensor_count as usize) }
    };
    let manifest = convert::manifest(tensors)?;
    for (tensor, (offset, spec)) in tensors.iter().zip(manifest.iter()) {
        if (tensor.offset, tensor.bytes) != (offset, spec.bytes()) {
            return Err(Failure::invalid(format!(
                "tensor {spec} of {} bytes at {}, must be {} at {offset}",
                tensor.bytes,
                tensor.offset,
                spec.bytes()
            )));
        }
    }
    if manifest.payload_bytes() > raw.bytes {
        return Err(Failure::invalid(format!(
            "the tensors need {} bytes, the payload has {}",
            manifest.payload_bytes(),
            raw.bytes
        )));
    }
    let data = if raw.bytes == 0 {
        std::ptr::NonNull::dangling().as_ptr()
    } else {
        raw.data
    };
    Ok((manifest, data, raw.bytes as usize))
}

/// The payload of a session's space, in host memory as `host` gives it. A device address becomes a number, never a slice.
///
/// # Safety
/// As [`tensors`], and for as long as the result lives the bytes are used as `host` asks for.
unsafe fn payload<H>(
    raw: *const abi::Payload,
    config: &SessionConfig,
    host: unsafe fn(*mut u8, usize) -> H,
) -> Result<TensorsIn<H>, Failure> {
    // SAFETY: the caller's duty.
    unsafe {
        let (tensors, data, bytes) = tensors(raw)?;
        Ok(match config.space {
            Space::Host => TensorsIn::from_checked(tensors, host(data, bytes)),
            Space::Cuda { .. } => {
                TensorsIn::from_checked_device(tensors, data.addr() as u64, bytes)
            }
        })
    }
}

/// # Safety
/// So many bytes that nothing writes for as long as the result lives.
unsafe fn shared<'a>(data: *mut u8, bytes: usize) -> &'a [u8] {
    // SAFETY: the caller's duty.
    unsafe { std::slice::from_raw_parts(data, bytes) }
}

/// # Safety
/// So many bytes that nothing else uses for as long as the result lives.
unsafe fn exclusive<'a>(data: *mut u8, bytes: usize) -> &'a mut [u8] {
    // SAFETY: the caller's duty.
    unsafe { std::slice::from_raw_parts_mut(data, bytes) }
}

/// # Safety
/// As [`exclusive`].
unsafe fn unguarded<'a>(data: *mut u8, bytes: usize) -> HostMut<'a> {
    HostMut {
        // SAFETY: the caller's duty.
        data: unsafe { exclusive(data, bytes) },
        tail: &mut [],
    }
}

/// The length of a plane's memory, after its size was checked against the session's; 0 for a plane that is not there.
fn plane_bytes(plane: &abi::Plane, index: usize, config: &SessionConfig) -> Result<usize, Failure> {
    let (width, height) = config.chroma.plane_size(index, config.width, config.height);
    if (plane.width, plane.height) != (width, height)
        || (height > 0 && (plane.data.is_null() || plane.stride < u64::from(width)))
    {
        return Err(Failure::invalid(format!(
            "plane {index} is {}x{} with a stride of {}, the session's is {width}x{height}",
            plane.width, plane.height, plane.stride
        )));
    }
    match height {
        0 => Ok(0),
        _ => Ok(plane.stride as usize * (height as usize - 1) + width as usize),
    }
}

/// The frames of a call, the memory of each plane as `host` gives it.
///
/// # Safety
/// `raw` points to `count` frames, and for as long as the result lives their planes are used as `host` asks for.
unsafe fn frames<D: Default + Deref<Target = [u8]>>(
    raw: *const abi::Frame,
    count: u32,
    config: &SessionConfig,
    host: unsafe fn(*mut u8, usize) -> D,
) -> Result<Vec<Frame<Plane<D>>>, Failure> {
    let mut views = Vec::with_capacity(count as usize);
    for number in 0..count as usize {
        let mut planes = <[Plane<D>; 3]>::default();
        for (index, view) in planes.iter_mut().enumerate().take(config.chroma.planes()) {
            // SAFETY: the caller's duty, and the plane's own numbers were checked.
            let (plane, data) = unsafe {
                let plane = (*raw.add(number)).planes[index];
                let bytes = plane_bytes(&plane, index, config)?;
                (plane, host(plane.data, bytes))
            };
            let (width, height) = (plane.width as usize, plane.height as usize);
            *view = Plane::new(data, plane.stride as usize, width, height)
                .ok_or_else(|| Failure::invalid("a plane is too short"))?;
        }
        views.push(Frame::new(planes));
    }
    Ok(views)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::denoise::cpu::Cpu;

    #[test]
    fn a_struct_that_is_too_short_is_refused_and_the_text_is_cut_to_the_buffer() {
        let table = table::<Cpu>();
        let mut text = [b'#'; 12];
        let mut error = abi::ErrorText {
            struct_size: abi::size::<abi::ErrorText>(),
            reserved: 0,
            text: text.as_mut_ptr(),
            capacity: 10,
            length: 99,
        };
        let config = SessionConfig::host(16, 16, crate::Chroma::Mono, 1).to_abi();
        let short = abi::SessionConfig {
            struct_size: 44,
            ..config
        };
        let mut session = std::ptr::null_mut();
        let create = table.create.expect("every entry is there");
        // SAFETY: all three structs live here, and the session stays null.
        let status = unsafe { create(&raw const short, &raw mut session, &raw mut error) };
        assert_eq!(status, abi::INVALID_ARGUMENT);
        assert!(session.is_null());
        assert_eq!((error.length, &text), (10, b"a struct o##"));

        // SAFETY: as above; a null error buffer is allowed.
        let status = unsafe { create(&raw const short, &raw mut session, std::ptr::null_mut()) };
        assert_eq!(status, abi::INVALID_ARGUMENT);

        // SAFETY: a null session may be destroyed.
        unsafe { table.destroy.expect("every entry is there")(std::ptr::null_mut()) };
    }
}
