//! The plugin side: two safe traits, and the functions that put them behind the table.
//!
//! Hazard: a caller's lying length is read as memory. So every struct's size, pointer and count is checked before it
//! becomes a slice, and every entry runs in `guarded`. The traits themselves see only slices and values.

use std::ffi::CStr;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

use pp_contract::{Manifest, VideoPlanParts};

use crate::abi::{self, OpaqueSession, Table, TableHead};
use crate::border::{guarded, panic_text, plan_of, sized, struct_size};
use crate::config::{ChunkShape, Layout, SessionConfig, Space};
use crate::convert::{self, RawTensors};
use crate::error::Failure;
use crate::frame::{Frame, FrameView, FrameViewMut, Plane};
use crate::group::{Borrowed, Collectives};
use crate::payload::{HostMut, Payload, PayloadMut, TensorsIn};
use crate::stage::{Description, FrameGeometry, StageInfo, StageKind};

/// A set of kernels, as its author writes it. Put it behind the C table with [`crate::export_kernels!`].
pub trait Kernels: 'static {
    /// The state of one stage of one stream.
    type Session: Session;

    /// What the kernels are, and their stages.
    fn describe() -> Description;

    /// Makes a session for a stage of the description; `config` is within its ranges, and asks for parts, laps or members
    /// only where the stage has the flag. `args` are the user's pairs; refuse a key that you do not know
    /// ([`no_args`] refuses all).
    ///
    /// # Errors
    /// A size, format, memory space or argument that is not served.
    fn create(
        stage: &StageInfo,
        config: &SessionConfig,
        args: &[(&str, &str)],
    ) -> Result<Self::Session, Failure>;

    /// A quick check that the kernels compute what they should on this machine.
    ///
    /// # Errors
    /// What differs.
    fn self_test() -> Result<(), Failure> {
        Ok(())
    }
}

/// Refuses every argument of the user, for kernels that have none.
///
/// # Errors
/// The first key.
pub fn no_args(args: &[(&str, &str)]) -> Result<(), Failure> {
    match args.first() {
        None => Ok(()),
        Some((key, _)) => Err(Failure::invalid(format!(
            "unknown argument {key}: these kernels take none; leave --plugin-arg out"
        ))),
    }
}

/// One stage of one stream. Calls never overlap; each may come from another thread.
///
/// A source is called with `encode`, a middle stage with `run`, a sink with `decode`. Frames have the planes and sizes
/// of the stage; plans are valid. Tensors must be asked for by name, type and shape, which refuses what does not fit. In
/// a session on host memory they are slices ([`Payload::tensor`]); in one on a CUDA device they are addresses
/// ([`Payload::device_tensor`]), the context is current, and calls only enqueue work on the session's stream: payloads
/// and samples stay as they are until the stream has passed the call.
pub trait Session: Send {
    /// The frames that a sink gives, where they are not like those that the source takes.
    fn frames(&self) -> Option<FrameGeometry> {
        None
    }

    /// The tensors of a chunk at this stage, in this lap. What a stage gives is what the next one gets.
    ///
    /// # Errors
    /// A shape that is not served.
    fn layout(&self, shape: ChunkShape, lap: u32) -> Result<Layout, Failure>;

    /// Frames to tensors. Every byte of every tensor must be written.
    ///
    /// # Errors
    /// What could not be done.
    fn encode(
        &mut self,
        frames: &[FrameView<'_>],
        plan: &VideoPlanParts,
        output: &mut PayloadMut<'_>,
    ) -> Result<(), Failure> {
        let _ = (frames, plan, output);
        Err(Failure::unsupported("this stage takes no frames"))
    }

    /// Tensors to tensors; gives the number of generator calls made: the passes of this part and lap, and one more if the
    /// cache was rebuilt. Of a group only member 0 has the memory of the tensors; the others have their lists. With
    /// zero steps, all stages together give the frames back, bit for bit.
    ///
    /// # Errors
    /// What could not be done.
    fn run(
        &mut self,
        plan: &VideoPlanParts,
        lap: u32,
        input: &Payload<'_>,
        output: &mut PayloadMut<'_>,
        group: Option<&mut dyn Collectives>,
    ) -> Result<u32, Failure> {
        let _ = (plan, lap, input, output, group);
        Err(Failure::unsupported("this stage is no middle stage"))
    }

    /// Tensors to frames. Every sample must be written.
    ///
    /// # Errors
    /// What could not be done.
    fn decode(
        &mut self,
        plan: &VideoPlanParts,
        input: &Payload<'_>,
        frames: &mut [FrameViewMut<'_>],
    ) -> Result<(), Failure> {
        let _ = (plan, input, frames);
        Err(Failure::unsupported("this stage gives no frames"))
    }
}

/// Exports the kernels of a type that implements [`Kernels`] as `pp_kernels_entry_v2`, once in a `cdylib`.
#[macro_export]
macro_rules! export_kernels {
    ($kernels:ty) => {
        /// The entry symbol of the plugin ABI.
        #[unsafe(no_mangle)]
        pub extern "C" fn pp_kernels_entry_v2() -> *const $crate::abi::Table {
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
        layout: Some(call::<K, abi::PpLayoutArgs>),
        run: Some(call::<K, abi::PpRunArgs>),
        self_test: Some(self_test::<K>),
    }
}

/// A session and what it was made for.
struct Held<S> {
    session: S,
    config: SessionConfig,
    kind: StageKind,
    /// The frames of a source or a sink.
    frames: FrameGeometry,
}

/// The session behind a pointer that `create` of the table of these kernels gave.
///
/// # Safety
/// The pointer came from there and is not given back while the result lives; no call on the session is under way.
pub(crate) unsafe fn held<'a, K: Kernels>(session: *mut OpaqueSession) -> &'a K::Session {
    // SAFETY: the caller's duty.
    unsafe { &(*session.cast::<Held<K::Session>>()).session }
}

unsafe extern "C" fn describe<K: Kernels>(
    out: *mut abi::PpDescription,
    error: *mut abi::ErrorText,
) -> u32 {
    // SAFETY: the pointers are valid for the call by the rules of the ABI.
    unsafe {
        guarded(error, || {
            // A host of an earlier minor version has a shorter struct.
            let bytes = struct_size(out, abi::DESCRIPTION_REQUIRED_BYTES)?;
            let bytes = bytes.min(abi::size::<abi::PpDescription>()) as usize;
            let mut raw: abi::PpDescription = std::mem::zeroed();
            let theirs = out.cast::<u8>();
            std::ptr::copy_nonoverlapping(theirs, (&raw mut raw).cast(), bytes);
            let description = K::describe();
            if description.stages.len() > raw.stage_capacity as usize {
                let count = description.stages.len();
                return Err(Failure::invalid(format!("no room for {count} stages")));
            }
            for (at, stage) in description.stages.iter().enumerate() {
                *raw.stages.add(at) = stage.to_abi();
            }
            raw.stage_count = description.stages.len() as u32;
            description.to_abi(&mut raw);
            std::ptr::copy_nonoverlapping((&raw const raw).cast(), theirs, bytes);
            Ok(())
        })
    }
}

unsafe extern "C" fn create<K: Kernels>(
    config: *const abi::PpSessionConfig,
    geometry: *mut abi::PpGeometry,
    out: *mut *mut OpaqueSession,
    error: *mut abi::ErrorText,
) -> u32 {
    // SAFETY: the pointers are valid for the call by the rules of the ABI.
    unsafe {
        guarded(error, || {
            let raw = sized(config)?;
            sized(geometry)?;
            let config = SessionConfig::from_abi(raw)?;
            let Description { stages, bits, .. } = K::describe();
            if config.bits > bits {
                let (has, takes) = (config.bits as u32, bits as u32);
                return Err(Failure::unsupported(format!(
                    "{has} bits a sample, these kernels take {takes}"
                )));
            }
            let stage = (stages.get(raw.stage as usize))
                .ok_or_else(|| Failure::invalid(format!("there is no stage {}", raw.stage)))?;
            let session = K::create(stage, &config, &args(raw)?)?;
            let frames = session.frames().filter(|_| stage.kind == StageKind::Sink);
            let frames = frames.unwrap_or_else(|| FrameGeometry::of(&config));
            *geometry = frames.to_abi();
            *out = Box::into_raw(Box::new(Held {
                session,
                config,
                kind: stage.kind,
                frames,
            }))
            .cast();
            Ok(())
        })
    }
}

/// The user's pairs.
///
/// # Safety
/// `raw` holds `arg_count` pairs, whose texts end with a NUL, and is valid for as long as the result lives.
unsafe fn args(raw: &abi::PpSessionConfig) -> Result<Vec<(&str, &str)>, Failure> {
    // SAFETY: the caller's duty.
    let text = |text: *const u8| unsafe { CStr::from_ptr(text.cast()) }.to_str();
    (0..raw.arg_count as usize)
        .map(|at| {
            // SAFETY: the caller's duty.
            let arg = unsafe { *raw.args.add(at) };
            match (text(arg.key), text(arg.value)) {
                (Ok(key), Ok(value)) => Ok((key, value)),
                _ => Err(Failure::invalid(format!("argument {at} is not UTF-8"))),
            }
        })
        .collect()
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

impl Call for abi::PpLayoutArgs {
    unsafe fn run<S: Session>(&mut self, held: &mut Held<S>) -> Result<(), Failure> {
        let shape = ChunkShape {
            frames: self.frames,
            steps: self.steps,
            context_frames: self.context_frames,
        };
        let layout = held.session.layout(shape, self.lap)?;
        let write = |list: &Manifest, out: *mut abi::PpTensor| {
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

impl Call for abi::PpRunArgs {
    unsafe fn run<S: Session>(&mut self, held: &mut Held<S>) -> Result<(), Failure> {
        let Held {
            session,
            config,
            kind,
            frames: geometry,
        } = held;
        // SAFETY: the caller's duty; by the rules of the ABI input and output do not overlap.
        unsafe {
            let plan = plan_of(self.plan)?;
            match kind {
                StageKind::Source => {
                    let frames = frames(self.frames, self.frame_count, geometry, shared)?;
                    let mut output = payload(self.output, config, unguarded)?;
                    session.encode(&frames, &plan, &mut output)
                }
                StageKind::Middle => {
                    let input = payload(self.input, config, shared)?;
                    let mut output = payload(self.output, config, unguarded)?;
                    let mut group = match self.group.is_null() {
                        true => None,
                        false => Some(Borrowed::new(sized(self.group)?, config.members)),
                    };
                    let group = group.as_mut().map(|group| group as &mut dyn Collectives);
                    self.observed_generator_calls =
                        session.run(&plan, self.lap, &input, &mut output, group)?;
                    Ok(())
                }
                StageKind::Sink => {
                    let mut frames = frames(self.frames, self.frame_count, geometry, exclusive)?;
                    let input = payload(self.input, config, shared)?;
                    session.decode(&plan, &input, &mut frames)
                }
            }
        }
    }
}

unsafe extern "C" fn self_test<K: Kernels>(error: *mut abi::ErrorText) -> u32 {
    // SAFETY: the pointer is valid for the call by the rules of the ABI.
    unsafe { guarded(error, K::self_test) }
}

/// A payload in the memory of the session's space, in which each tensor was checked to lie; of the host as `host` gives it.
/// A payload of the group's leader may have no memory. A device address becomes a number, never a slice.
///
/// # Safety
/// `raw` is valid for the call, with `tensor_count` tensors and `bytes` bytes behind its pointers, and for as long as the
/// result lives the bytes are used as `host` asks for.
unsafe fn payload<H>(
    raw: *const abi::PpPayload,
    config: &SessionConfig,
    host: unsafe fn(*mut u8, usize) -> H,
) -> Result<TensorsIn<H>, Failure> {
    // SAFETY: the caller's duty.
    let raw = unsafe { sized(raw) }?;
    if raw.tensor_count as usize > abi::MAX_TENSORS {
        return Err(Failure::invalid(format!(
            "{} tensors in a payload",
            raw.tensor_count
        )));
    }
    let tensors: &[abi::PpTensor] = if raw.tensor_count == 0 {
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
    if raw.data.is_null() && config.member > 0 {
        return Ok(TensorsIn::of_leader(&manifest));
    }
    if manifest.payload_bytes() > raw.bytes {
        return Err(Failure::invalid(format!(
            "the tensors need {} bytes, the payload has {}",
            manifest.payload_bytes(),
            raw.bytes
        )));
    }
    let bytes = raw.bytes as usize;
    let data = match bytes {
        0 => NonNull::dangling().as_ptr(),
        _ => raw.data,
    };
    Ok(match config.space {
        // SAFETY: the caller's duty; no bytes may lie anywhere.
        Space::Host => TensorsIn::from_checked(manifest, unsafe { host(data, bytes) }),
        Space::Cuda { .. } => TensorsIn::from_checked_device(manifest, data.addr() as u64, bytes),
    })
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

/// The length of a plane's memory, after its size was checked against the stage's; 0 for a plane that is not there.
fn plane_bytes(
    plane: &abi::PpPlane,
    index: usize,
    geometry: &FrameGeometry,
) -> Result<usize, Failure> {
    let (width, height) = geometry.plane_size(index);
    let row_bytes = u64::from(width) * geometry.bits.bytes() as u64;
    if (plane.width, plane.height) != (width, height)
        || (height > 0 && (plane.data.is_null() || plane.stride < row_bytes))
    {
        return Err(Failure::invalid(format!(
            "plane {index} is {}x{} with a stride of {}, the stage's is {width}x{height}",
            plane.width, plane.height, plane.stride
        )));
    }
    match height {
        0 => Ok(0),
        _ => Ok(plane.stride as usize * (height as usize - 1) + row_bytes as usize),
    }
}

/// The frames of a call, the memory of each plane as `host` gives it.
///
/// # Safety
/// `raw` points to `count` frames, and for as long as the result lives their planes are used as `host` asks for.
unsafe fn frames<D: Default + Deref<Target = [u8]>>(
    raw: *const abi::PpFrame,
    count: u32,
    geometry: &FrameGeometry,
    host: unsafe fn(*mut u8, usize) -> D,
) -> Result<Vec<Frame<Plane<D>>>, Failure> {
    if raw.is_null() && count > 0 {
        return Err(Failure::invalid("the frames are missing"));
    }
    let mut views = Vec::with_capacity(count as usize);
    for number in 0..count as usize {
        let mut planes = <[Plane<D>; 3]>::default();
        for (index, view) in planes.iter_mut().enumerate().take(geometry.chroma.planes()) {
            // SAFETY: the caller's duty, and the plane's own numbers were checked.
            let (plane, data) = unsafe {
                let plane = (*raw.add(number)).planes[index];
                let bytes = plane_bytes(&plane, index, geometry)?;
                (plane, host(plane.data, bytes))
            };
            let size = (plane.width as usize, plane.height as usize);
            *view = Plane::with_bits(data, plane.stride as usize, size, geometry.bits)
                .ok_or_else(|| Failure::invalid("a plane is too short, or at an odd address"))?;
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
        let config = SessionConfig::host(16, 16, crate::Chroma::Mono, 1);
        let mut geometry = FrameGeometry::of(&config).to_abi();
        let config = config.to_abi(0, &[]);
        let short = abi::PpSessionConfig {
            struct_size: 84,
            ..config
        };
        let mut session = std::ptr::null_mut();
        let create = table.create.expect("every entry is there");
        // SAFETY: all structs live here, and the session stays null.
        let status = unsafe {
            create(
                &raw const short,
                &raw mut geometry,
                &raw mut session,
                &raw mut error,
            )
        };
        assert_eq!(status, abi::INVALID_ARGUMENT);
        assert!(session.is_null());
        assert_eq!((error.length, &text), (10, b"a struct o##"));

        let no_error = std::ptr::null_mut();
        // SAFETY: as above; a null error buffer is allowed.
        let status = unsafe {
            create(
                &raw const short,
                &raw mut geometry,
                &raw mut session,
                no_error,
            )
        };
        assert_eq!(status, abi::INVALID_ARGUMENT);

        // SAFETY: zero is a value of every field, of a pointer null.
        let mut about: abi::PpDescription = unsafe { std::mem::zeroed() };
        let mut stages = [StageInfo::EMPTY; abi::MAX_STAGES];
        (about.stages, about.stage_capacity) = (stages.as_mut_ptr(), stages.len() as u32);
        let describe = table.describe.expect("every entry is there");
        for (struct_size, status, bits) in [
            (
                abi::DESCRIPTION_REQUIRED_BYTES - 1,
                abi::INVALID_ARGUMENT,
                9,
            ),
            // A host of version 2.3 knows no bits.
            (abi::DESCRIPTION_REQUIRED_BYTES, abi::OK, 9),
            (abi::size::<abi::PpDescription>(), abi::OK, 10),
        ] {
            (about.struct_size, about.bits, about.stage_count) = (struct_size, 9, 0);
            // SAFETY: as above.
            assert_eq!(unsafe { describe(&raw mut about, no_error) }, status);
            assert_eq!(about.bits, bits);
            assert_eq!(about.stage_count, if status == abi::OK { 3 } else { 0 });
        }

        // SAFETY: a null session may be destroyed.
        unsafe { table.destroy.expect("every entry is there")(std::ptr::null_mut()) };
    }
}
