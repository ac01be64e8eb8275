//! Holds the kernels under test, and opens their sessions.

use std::cell::{Cell, RefCell};

use pp_device::{CudaError, Stream};

use super::outcome::{Outcome, Why, fail};
use super::session::{CheckedSession, Hears};
use crate::config::{Bits, Chroma, SessionConfig, Space};
use crate::cuda::borrow;
use crate::error::Status;
use crate::plugin::KernelSet;
use crate::stage::StageInfo;

/// Sizes of frames, of which the checks take the first that the kernels take.
const SIZES: [(u32, u32); 5] = [(40, 24), (64, 64), (128, 128), (256, 256), (512, 512)];
/// Most frames in a chunk.
pub(super) const MOST_FRAMES: u32 = 3;
/// Fills memory that nothing has written.
const FILL: u8 = 0xA5;

/// A stage that is shared out, if one is, and the numbers of its parts, laps and members.
pub(super) type Sharing<'a> = Option<(&'a str, [u32; 3])>;

/// Describes the sessions of a film.
#[derive(Clone, Copy)]
pub(super) struct Setup<'a> {
    pub(super) config: SessionConfig,
    pub(super) sharing: Sharing<'a>,
    /// Fills memory that nothing has written.
    pub(super) fill: u8,
    /// Says of a subject on a device which stages are in host memory all the same.
    pub(super) on_host: fn(&StageInfo) -> bool,
}

/// Names the kernels to check, and the memory in which their payloads are to lie.
pub struct Subject<'a> {
    pub(super) set: &'a KernelSet,
    /// Of a device.
    pub(super) stream: Option<Stream>,
    /// The user's.
    pub(super) args: &'a [(String, String)],
    size: Option<(u32, u32)>,
    /// Of a sample of the sessions.
    pub(super) bits: Cell<Bits>,
    /// Width, height and chroma format of the sessions, once they are known.
    found: Cell<Option<(u32, u32, Chroma)>>,
    hears: Hears<'a>,
    /// Sizes that the kernels did not take in the check under way, and why.
    pub(super) skipped: RefCell<Vec<String>>,
}

impl<'a> Subject<'a> {
    /// Checks sessions on host memory.
    #[must_use]
    pub fn on_host(set: &'a KernelSet) -> Self {
        Subject {
            set,
            stream: None,
            args: &[],
            size: None,
            bits: Cell::default(),
            found: Cell::default(),
            hears: None,
            skipped: RefCell::default(),
        }
    }

    /// Checks sessions in the memory of a CUDA device.
    ///
    /// # Safety
    /// `context` is a live `CUcontext` and `stream` a live `CUstream` of it. Both outlive the subject. The context is
    /// current on the calling thread, and on every thread that runs a check on the subject.
    ///
    /// # Errors
    /// No driver, one that is too old, or another context is current.
    pub unsafe fn on_device(
        set: &'a KernelSet,
        context: u64,
        stream: u64,
    ) -> Result<Self, CudaError> {
        let mut subject = Subject::on_host(set);
        // SAFETY: the caller's duty.
        subject.stream = Some(unsafe { borrow(context, stream) }?);
        Ok(subject)
    }

    /// Gives the kernels these arguments of the user, and frames of this width and height; without a size, those of the
    /// first of a few sizes that the kernels take.
    #[must_use]
    pub fn with(self, args: &'a [(String, String)], size: Option<(u32, u32)>) -> Self {
        Subject { args, size, ..self }
    }

    /// Tells of each call before it is made: the call in which kernels crash or hang is the last that was told.
    #[must_use]
    pub fn heard_by(self, hears: &'a (dyn Fn(&str) + Sync)) -> Self {
        let hears = Some(hears);
        Subject { hears, ..self }
    }

    /// Opens a session of a stage. On a device each member of a group but the first has a stream of its own.
    pub(super) fn open(
        &self,
        stage: &str,
        setup: &Setup<'_>,
        args: &[(String, String)],
    ) -> Outcome<CheckedSession<'a>> {
        let mut stages = self.set.stages().iter();
        let is_on_host = stages.any(|info| info.name == stage && (setup.on_host)(info));
        let stream = match &self.stream {
            _ if is_on_host => None,
            Some(stream) if setup.config.member > 0 => Some(Stream::new(stream.device())?),
            stream => stream.clone(),
        };
        let space = stream.as_ref().map_or(Space::Host, |stream| Space::Cuda {
            context: stream.device().raw_context(),
            stream: stream.raw(),
        });
        let config = SessionConfig {
            space,
            ..setup.config
        };
        if let Some(hears) = self.hears {
            hears(&format!("create of {stage}"));
        }
        // SAFETY: what `on_device` asks of its caller; a stream of its own is kept beside the session and dropped behind it.
        let raw = unsafe { self.set.open_raw(stage, &config, args) }?;
        Ok(CheckedSession {
            raw,
            stream,
            hears: self.hears,
            fill: setup.fill,
        })
    }

    /// Describes small sessions in the first chroma format and size that the kernels take.
    pub(super) fn setup(&self) -> Outcome<Setup<'static>> {
        match self.find()? {
            Some(setup) => Ok(setup),
            None => fail(format!(
                "the kernels refuse every size that was tried, {}; name one with --width and --height",
                self.skipped.take().join(", ")
            )),
        }
    }

    /// Says why the kernels take no session in this memory with the user's arguments, if they refuse all with
    /// `PP_UNSUPPORTED`.
    #[must_use]
    pub fn refusal(&self) -> Option<String> {
        let found = self.find();
        let refused = self.skipped.take().join(", ");
        matches!(found, Ok(None)).then_some(refused)
    }

    fn find(&self) -> Outcome<Option<Setup<'static>>> {
        let sizes = match &self.size {
            Some(size) => std::slice::from_ref(size),
            None => &SIZES[..],
        };
        let formats = self.set.describe().chroma.iter();
        for (chroma, (width, height)) in
            formats.flat_map(|of| sizes.iter().map(move |size| (*of, *size)))
        {
            let is_known = self.found.get().is_some();
            if !is_known && self.takes(&self.setup_of(width, height, chroma))? {
                self.found.set(Some((width, height, chroma)));
            }
        }
        let found = self.found.get();
        Ok(found.map(|(width, height, chroma)| self.setup_of(width, height, chroma)))
    }

    pub(super) fn setup_of(&self, width: u32, height: u32, chroma: Chroma) -> Setup<'static> {
        let mut config = SessionConfig::host(width, height, chroma, MOST_FRAMES);
        (config.threads, config.bits) = (2, self.bits.get());
        Setup {
            config,
            sharing: None,
            fill: FILL,
            on_host: |_| false,
        }
    }

    /// Says whether the kernels take frames of a size. A size that they refuse with `PP_UNSUPPORTED` is noted.
    pub(super) fn takes(&self, setup: &Setup<'_>) -> Outcome<bool> {
        let mut stages = self.set.stages().iter();
        let Err(why) =
            stages.try_for_each(|stage| self.open(&stage.name, setup, self.args).map(drop))
        else {
            return Ok(true);
        };
        let (width, height) = (setup.config.width, setup.config.height);
        self.skip(&format!("{width}x{height}"), why)?;
        Ok(false)
    }

    /// Notes what the kernels refuse with `PP_UNSUPPORTED`. Another error stays one.
    pub(super) fn skip(&self, what: &str, why: Why) -> Outcome {
        let Some(("create", Status::Unsupported, text)) = why.refusal() else {
            return Err(why);
        };
        let note = format!("{what} ({text})");
        let mut skipped = self.skipped.borrow_mut();
        if !skipped.contains(&note) {
            skipped.push(note);
        }
        Ok(())
    }
}
