//! The compiled code of one part: loaded once in a process, with a container of its own for each session.

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_void};
use std::mem::ManuallyDrop;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use half::bf16;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use pp_kernels::{DType, Failure, TensorSpec};

use crate::package::{self, About, Identity, Package, Part, Sizes};
use crate::torch::{Code, Handle, OnStream, Place, Tensor, Torch, words};

/// A package's `AOTInductorModelContainer`.
type Container = *mut c_void;
type Run = unsafe extern "C" fn(
    Container,
    *mut Handle,
    usize,
    *mut Handle,
    usize,
    *mut c_void,
    *mut c_void,
) -> Code;

/// Tensors that are kept for slots. What is beyond them has addresses that do not come again.
const MOST_KEPT: usize = 256;

/// The functions of a part's library, as interface.h of AOTInductor declares them.
struct Compiled {
    create: unsafe extern "C" fn(*mut Container, usize, *const c_char, *const c_char) -> Code,
    delete: unsafe extern "C" fn(Container) -> Code,
    run: Run,
    inputs: unsafe extern "C" fn(Container, *mut usize) -> Code,
    outputs: unsafe extern "C" fn(Container, *mut usize) -> Code,
    /// Newer than PyTorch 2.11.
    error: Option<unsafe extern "C" fn(*mut *const c_char) -> Code>,
    /// Where its files were when it was loaded: what is not in its memory it looks for there.
    folder: PathBuf,
}

/// What was loaded, of which file and part. It is never unloaded.
static LOADED: Mutex<Vec<(Identity, usize, &'static Compiled)>> = Mutex::new(Vec::new());

/// One part of a package, ready to run on one thread at a time.
pub(crate) struct Model {
    code: &'static Compiled,
    container: Container,
    torch: &'static Torch,
    place: Place,
    pub(crate) part: Part,
    /// The tensors of chunks of the sizes that came so far: the inputs, then the output.
    specs: Vec<(Sizes, Vec<TensorSpec>)>,
    /// By number of the tensor, address and sizes.
    kept: HashMap<(usize, u64, Sizes), Tensor>,
    handles: Vec<Handle>,
}

// SAFETY: the container has no thread of its own and is used under `&mut`; AOTInductor lets any thread call it.
unsafe impl Send for Model {}

/// Refuses a package that this machine or this PyTorch cannot run.
pub(crate) fn check(
    path: &Path,
    about: &About,
    place: Place,
    capability: [u32; 2],
) -> Result<(), Failure> {
    let refuse = |why: String| Err(Failure::error(format!("{}: {why}", path.display())));
    let device = match place {
        Place::Host => "cpu",
        Place::Cuda(_) => "cuda",
    };
    if about.device != device {
        // In the other memory it may be right.
        return Err(Failure::unsupported(format!(
            "{}: it was compiled for {}, and this rank works on {device}; export it with an example on {device}, or run the stage \
             on {}",
            path.display(),
            about.device,
            about.device
        )));
    }
    let torch = Torch::get()?;
    let [major, minor, _] = torch.version;
    if !about.torch.starts_with(&format!("{major}.{minor}.")) {
        return refuse(format!(
            "it was compiled by PyTorch {}, and {} is PyTorch {major}.{minor}; export it with that one, or set PP_LIBTORCH to the \
             folder of the other's libtorch.so",
            about.torch,
            torch.path.display()
        ));
    }
    if place != Place::Host && !torch.has_cuda() {
        let library = torch.path.display();
        return refuse(format!(
            "{library} has no CUDA; install a PyTorch for CUDA, or set PP_LIBTORCH to its folder"
        ));
    }
    if let Place::Cuda(_) = place
        && about.capability != capability
    {
        let ([a, b], [c, d]) = (about.capability, capability);
        return refuse(format!(
            "it was compiled for GPUs of compute capability {a}.{b}, and this one has {c}.{d}; export it on such a GPU"
        ));
    }
    if let Some(missing) = lacks(&about.cpu) {
        return refuse(format!(
            "it was compiled for processors with {missing}, and this one has none; export it on this machine"
        ));
    }
    Ok(())
}

/// The first of these features that the processor does not have.
fn lacks(features: &[String]) -> Option<&str> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text
        .lines()
        .find(|line| line.starts_with("flags") || line.starts_with("Features"))?;
    let has: Vec<&str> = line.split_whitespace().collect();
    let mut features = features.iter().map(String::as_str);
    features.find(|feature| !has.contains(feature))
}

impl Model {
    /// Loads a part, and computes its example. On a device that also loads its kernels, so that no run has to.
    ///
    /// # Errors
    /// The package is damaged, lacks a function or asks for one that this PyTorch lacks; the example gives another result.
    pub(crate) fn open(
        (path, package): (&Path, &Package),
        number: usize,
        (part, [example, most]): (Part, [Sizes; 2]),
        (place, stream): (Place, u64),
    ) -> Result<Model, Failure> {
        let torch = Torch::get()?;
        let identity = package::identity(path)?;
        // One at a time: a part that is opened again has its files in the same place.
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        let known = loaded
            .iter()
            .find(|(of, at, _)| *of == identity && *at == number);
        let known = known.map(|(_, _, code)| *code);
        let has_files = place != Place::Host || identity.2 > 1 << 30;
        let unpacked = match known {
            Some(_) if !has_files => None,
            known => Some(package.unpack(number, known.map(|code| &*code.folder))?),
        };
        let code = match (known, &unpacked) {
            (None, Some((folder, library))) => {
                Box::leak(Box::new(Compiled::load(path, library, folder.0.clone())?))
            }
            (known, _) => known.ok_or_else(|| Failure::error("a part that was loaded is gone"))?,
        };
        let mut model = Self::of(code, torch, place, part)?;
        if known.is_none() || place != Place::Host {
            let bytes = package.read(&format!("extra/pp/part{number}.example"))?;
            model.test(path, &bytes, example, stream)?;
        }
        // Only what has passed is known to the next session.
        if known.is_none() {
            loaded.push((identity, number, code));
        }
        if place != Place::Host {
            model.warm(most, stream)?;
        }
        Ok(model)
    }

    fn of(
        code: &'static Compiled,
        torch: &'static Torch,
        place: Place,
        part: Part,
    ) -> Result<Model, Failure> {
        let device = match place {
            Place::Host => c"cpu".to_owned(),
            Place::Cuda(number) => CString::new(format!("cuda:{number}")).unwrap_or_default(),
        };
        if place != Place::Host {
            // The first allocation starts PyTorch's side of CUDA.
            torch.empty((DType::U8, &[16]), place)?;
        }
        let folder = CString::new(code.folder.as_os_str().as_bytes()).unwrap_or_default();
        let mut container = ptr::null_mut();
        // SAFETY: both texts end with a NUL and are copied; writes one pointer to a local.
        let made =
            unsafe { (code.create)(&raw mut container, 1, device.as_ptr(), folder.as_ptr()) };
        code.judge(made, "be prepared")?;
        let model = Model {
            code,
            container,
            torch,
            place,
            part,
            specs: Vec::new(),
            kept: HashMap::new(),
            handles: Vec::new(),
        };
        let (mut inputs, mut outputs) = (0, 0);
        // SAFETY: the container lives; each call writes one number to a local.
        let counted = unsafe {
            (code.inputs)(container, &raw mut inputs) | (code.outputs)(container, &raw mut outputs)
        };
        code.judge(counted, "be counted")?;
        if (inputs, outputs) != (model.part.inputs.len() + 1, 0) {
            return Err(Failure::invalid(format!(
                "the compiled code takes {inputs} tensors and gives {outputs}, and the package says {} and 0; write it again with \
                 pp_pipeline.export",
                model.part.inputs.len() + 1
            )));
        }
        Ok(model)
    }

    /// The inputs and then the output, in a chunk of these sizes.
    pub(crate) fn specs(&mut self, sizes: Sizes) -> Result<&[TensorSpec], Failure> {
        let found = self.specs.iter().position(|(of, _)| *of == sizes);
        let at = match found {
            Some(at) => at,
            None => {
                let all = self.part.inputs.iter().chain([&self.part.output]);
                let all = all
                    .map(|tensor| tensor.spec(sizes))
                    .collect::<Result<_, _>>()?;
                self.specs.push((sizes, all));
                self.specs.len() - 1
            }
        };
        Ok(&self.specs[at].1)
    }

    /// Runs the part on tensors at these addresses: the inputs, then the output. On a device it only enqueues.
    ///
    /// # Safety
    /// At each address lies, in the memory of the session, a tensor as [`Model::specs`] says, the last of which may be written,
    /// until the stream has passed the call. `stream` is the session's `CUstream`, or 0 on the host.
    pub(crate) unsafe fn run(
        &mut self,
        addresses: &[u64],
        sizes: Sizes,
        stream: u64,
    ) -> Result<(), Failure> {
        self.specs(sizes)?;
        if self.kept.len() > MOST_KEPT {
            self.kept.clear();
        }
        let specs = self
            .specs
            .iter()
            .find(|(of, _)| *of == sizes)
            .map_or(&[][..], |(_, specs)| specs);
        self.handles.clear();
        for (at, (address, spec)) in addresses.iter().zip(specs).enumerate() {
            let key = (at, *address, sizes);
            if !self.kept.contains_key(&key) {
                let shape = (spec.dtype(), spec.shape().dims());
                // SAFETY: the caller's duty. Later calls use it only where they were given the same address.
                let tensor = unsafe { self.torch.over(*address, shape, self.place) }?;
                self.kept.insert(key, tensor);
            }
            self.handles.push(self.kept[&key].alias()?);
        }
        let (inputs, count) = (self.handles.as_mut_ptr(), self.handles.len());
        let (none, stream) = (
            ptr::null_mut(),
            ptr::with_exposed_provenance_mut(stream as usize),
        );
        // SAFETY: as many handles as the code takes, each a tensor of the type and shape that it was compiled for, which it takes
        // over; the memory behind them is the caller's duty.
        let ran = unsafe {
            (self.code.run)(
                self.container,
                inputs,
                count,
                none,
                0,
                stream,
                ptr::null_mut(),
            )
        };
        self.code.judge(ran, "run")
    }

    /// Computes the example and compares the result.
    fn test(
        &mut self,
        path: &Path,
        example: &[u8],
        sizes: Sizes,
        stream: u64,
    ) -> Result<(), Failure> {
        let _on_stream = self.on_stream(stream)?;
        let made = self.once(example, sizes, stream).map_err(|error| {
            Failure::new(
                error.status,
                format!("{}: {}", path.display(), error.message),
            )
        })?;
        let Some(spec) = self.specs(sizes)?.last().cloned() else {
            return Ok(());
        };
        let found = self
            .torch
            .empty((spec.dtype(), spec.shape().dims()), Place::Host)?;
        found.fill(&made)?;
        let (bytes, address) = (spec.bytes() as usize, found.address()? as usize);
        // SAFETY: a tensor on the host of so many bytes, which lives until the end of this function and is written no more.
        let found =
            unsafe { std::slice::from_raw_parts(ptr::with_exposed_provenance(address), bytes) };
        let expected = &example[example.len() - bytes..];
        compare(spec.dtype(), found, expected, self.part.tolerance).map_err(|why| {
            Failure::error(format!(
                "{}: the self-test of a part failed: {why}",
                path.display()
            ))
        })
    }

    /// Runs the largest chunk once on zeros, so that no later run has to allocate or to choose its algorithms.
    fn warm(&mut self, most: Sizes, stream: u64) -> Result<(), Failure> {
        let _on_stream = self.on_stream(stream)?;
        let bytes: u64 = self.specs(most)?.iter().map(TensorSpec::bytes).sum();
        let made = self.once(&vec![0; bytes as usize], most, stream)?;
        // The copy waits for the run.
        let spec = self.specs(most)?.last().cloned();
        let spec = spec.ok_or_else(|| Failure::error("a part without tensors"))?;
        self.torch
            .empty((spec.dtype(), spec.shape().dims()), Place::Host)?
            .fill(&made)
    }

    /// On a device, sends PyTorch's own work of this thread to the session's stream.
    fn on_stream(&self, stream: u64) -> Result<Option<OnStream>, Failure> {
        match self.place {
            Place::Host => Ok(None),
            // SAFETY: the session's stream, which the caller of `open` gives with its device.
            Place::Cuda(device) => unsafe { self.torch.on_stream(stream, device) }.map(Some),
        }
    }

    /// Runs once on these bytes, those of one tensor behind those of the other, and gives the output.
    fn once(&mut self, bytes: &[u8], sizes: Sizes, stream: u64) -> Result<Tensor, Failure> {
        let specs = self.specs(sizes)?.to_vec();
        if specs.iter().map(TensorSpec::bytes).sum::<u64>() != bytes.len() as u64 {
            return Err(Failure::invalid(format!(
                "the example has {} bytes, which is not what its tensors take; write it again with pp_pipeline.export",
                bytes.len()
            )));
        }
        let (mut given, mut rest) = (Vec::new(), bytes);
        for spec in &specs {
            let (own, behind) = rest.split_at(spec.bytes() as usize);
            rest = behind;
            let shape = (spec.dtype(), spec.shape().dims());
            let tensor = self.torch.empty(shape, self.place)?;
            let address = own.as_ptr().expose_provenance() as u64;
            // SAFETY: these bytes are there for as long as this call, and are read only: a copy from memory that is not
            // page-locked has read them when it returns.
            tensor.fill(&unsafe { self.torch.over(address, shape, Place::Host) }?)?;
            given.push(tensor);
        }
        let addresses = given
            .iter()
            .map(Tensor::address)
            .collect::<Result<Vec<_>, _>>()?;
        // SAFETY: tensors of these specs. The inputs are freed in the order of the stream, which is PyTorch's current one.
        let ran = unsafe { self.run(&addresses, sizes, stream) };
        self.kept.clear();
        ran?;
        given
            .pop()
            .ok_or_else(|| Failure::error("a part without tensors"))
    }
}

/// Fails where a value lies further off than `tolerance` of the largest one.
fn compare(dtype: DType, found: &[u8], expected: &[u8], tolerance: f32) -> Result<(), String> {
    let values = |bytes: &[u8]| -> Vec<f32> {
        match dtype {
            DType::Bf16 => bytes
                .chunks_exact(2)
                .map(|two| bf16::from_le_bytes([two[0], two[1]]).to_f32())
                .collect(),
            _ => bytes
                .chunks_exact(4)
                .map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]]))
                .collect(),
        }
    };
    let (found, expected) = (values(found), values(expected));
    let largest = expected
        .iter()
        .fold(0.0_f32, |most, value| most.max(value.abs()));
    let off = found
        .iter()
        .zip(&expected)
        .map(|(a, b)| if a == b { 0.0 } else { (a - b).abs() });
    // What is no number lies infinitely far off.
    let most = off.fold(0.0_f32, |most, off| if off <= most { most } else { off });
    match most <= tolerance * largest {
        true => Ok(()),
        false => Err(format!(
            "a value differs by {most} from that of the eager module, whose largest is {largest}; export it on this machine, or with \
             a larger tolerance than {tolerance}"
        )),
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        // SAFETY: the container was made once, is deleted once, and does nothing any more (`Stage`'s drop sees to that).
        unsafe { (self.code.delete)(self.container) };
    }
}

impl Compiled {
    fn load(path: &Path, library: &Path, folder: PathBuf) -> Result<Compiled, Failure> {
        let refused = |error: &dyn std::error::Error| {
            let words = error
                .source()
                .map_or_else(|| error.to_string(), ToString::to_string);
            let words = words.replace(&*library.to_string_lossy(), "its library");
            let remedy = match words.contains("failed to map") {
                true => "set TMPDIR to a folder from which programs may run",
                false => {
                    "export it with the PyTorch that PP_LIBTORCH or the environment of Python names here"
                }
            };
            Failure::error(format!(
                "{} cannot be loaded: {words}; {remedy}",
                path.display()
            ))
        };
        // SAFETY: running the package's code is what loading means; the user named the file, and its checksums were right.
        let opened = unsafe { Library::open(Some(library), RTLD_NOW | RTLD_LOCAL) };
        let opened = ManuallyDrop::new(opened.map_err(|error| refused(&error))?);
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: interface.h declares the function of this name with the type of its field, for as long as AOTInductor
                // has these names.
                *unsafe { opened.get($name) }.map_err(|error| refused(&error))?
            };
        }
        Ok(Compiled {
            create: function!(b"AOTInductorModelContainerCreateWithDevice"),
            delete: function!(b"AOTInductorModelContainerDelete"),
            run: function!(b"AOTInductorModelContainerRunSingleThreaded"),
            inputs: function!(b"AOTInductorModelContainerGetNumInputs"),
            outputs: function!(b"AOTInductorModelContainerGetNumOutputs"),
            // SAFETY: as above.
            error: unsafe { opened.get(b"AOTInductorGetLastError") }
                .ok()
                .map(|found| *found),
            folder,
        })
    }

    fn judge(&self, code: Code, what: &str) -> Result<(), Failure> {
        if code == 0 {
            return Ok(());
        }
        let mut text = ptr::null();
        // SAFETY: writes one pointer to a local: null, or a text that stays until this thread's next error.
        let words = self.error.and_then(|error| unsafe {
            error(&raw mut text);
            words(text)
        });
        let words = words.unwrap_or_else(|| "its words are on standard error".into());
        Err(Failure::error(format!(
            "the package cannot {what}: {words}"
        )))
    }
}
