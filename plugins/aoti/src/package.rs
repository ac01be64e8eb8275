//! The file: a zip of stored entries, with what `pp_pipeline.export` wrote beside the compiled code.
//!
//! Hazard: a file that was cut off, or changed on its way, is mapped and run. Guarantee: each entry that is used has the length
//! and the checksum that the zip states, before any of it is loaded. Not guaranteed: safety from a hostile file. Its code runs.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use pp_kernels::{DType, Failure, TensorSpec};
use rawzip::{CompressionMethod, FileReader, ZipArchive, ZipArchiveEntryWayfinder};
use serde::Deserialize;

/// The form of `package.json` that this plugin reads.
const FORMAT: u32 = 1;
/// No entry that is read into memory is larger.
const MOST_BYTES: u64 = 4 << 30;

/// What a package says about itself.
#[derive(Debug, Deserialize)]
pub(crate) struct About {
    format: u32,
    /// The version of PyTorch that compiled it.
    pub(crate) torch: String,
    /// `cpu` or `cuda`.
    pub(crate) device: String,
    /// Of the processor: what its instructions need.
    #[serde(default)]
    pub(crate) cpu: Vec<String>,
    /// Of the GPU: its compute capability.
    #[serde(default)]
    pub(crate) capability: [u32; 2],
    pub(crate) example: Sizes,
    pub(crate) parts: Vec<Part>,
}

/// What may differ between chunks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
pub(crate) struct Sizes {
    pub(crate) frames: u32,
    #[serde(default)]
    pub(crate) steps: u32,
}

/// What one part reads and makes.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Part {
    pub(crate) inputs: Vec<Tensor>,
    pub(crate) output: Tensor,
    /// How far the self-test's result may lie off, in parts of its largest value.
    pub(crate) tolerance: f32,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    dtype: String,
    dims: Vec<Dim>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Dim {
    Fixed(u64),
    Named(Named),
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Named {
    Frames,
    Steps,
}

impl Tensor {
    /// Says whether its size depends on the steps of a chunk.
    pub(crate) fn has_steps(&self) -> bool {
        let mut dims = self.dims.iter();
        dims.any(|dim| matches!(dim, Dim::Named(Named::Steps)))
    }

    /// The tensor of a chunk of these sizes.
    pub(crate) fn spec(&self, sizes: Sizes) -> Result<TensorSpec, Failure> {
        let dtype = DType::ALL
            .iter()
            .copied()
            .find(|of| of.to_string() == self.dtype);
        let dtype = dtype.ok_or_else(|| {
            Failure::invalid(format!(
                "{} is of the unknown type {}",
                self.name, self.dtype
            ))
        })?;
        let dims = self.dims.iter().map(|dim| match dim {
            Dim::Fixed(size) => *size,
            Dim::Named(Named::Frames) => sizes.frames.into(),
            Dim::Named(Named::Steps) => sizes.steps.into(),
        });
        Ok(TensorSpec::new(
            &self.name,
            dtype,
            &dims.collect::<Vec<_>>(),
        )?)
    }
}

/// A file whose directory was read.
pub(crate) struct Package {
    path: PathBuf,
    archive: ZipArchive<FileReader>,
    /// Of each file, its name behind the folder of the archive.
    entries: Vec<(String, ZipArchiveEntryWayfinder)>,
}

/// Tells one state of a file from another.
pub(crate) type Identity = (u64, u64, u64, i64, i64);

/// # Errors
/// The file cannot be looked at.
pub(crate) fn identity(path: &Path) -> Result<Identity, Failure> {
    let of = fs::metadata(path).map_err(|error| unreadable(path, &error))?;
    Ok((of.dev(), of.ino(), of.size(), of.mtime(), of.mtime_nsec()))
}

fn unreadable(path: &Path, error: &dyn std::fmt::Display) -> Failure {
    let path = path.display();
    Failure::invalid(format!(
        "{path} cannot be read: {error}; give the path of a package, STAGE=FILE.pt2"
    ))
}

fn damaged(path: &Path, what: &str) -> Failure {
    let path = path.display();
    Failure::invalid(format!(
        "{path} is cut off or damaged ({what}); copy it again, or write it again with pp_pipeline.export"
    ))
}

impl Package {
    /// Reads the directory of the file.
    ///
    /// # Errors
    /// The file is no package, or not a whole one.
    pub(crate) fn open(path: &Path) -> Result<Package, Failure> {
        let file = File::open(path).map_err(|error| unreadable(path, &error))?;
        if !file.metadata().is_ok_and(|of| of.is_file()) {
            return Err(unreadable(path, &"it is no file"));
        }
        let broken = |error: rawzip::Error| damaged(path, &error.to_string());
        let mut buffer = vec![0; rawzip::RECOMMENDED_BUFFER_SIZE];
        let archive = ZipArchive::from_file(file, &mut buffer).map_err(broken)?;
        let (mut entries, mut found) = (Vec::new(), archive.entries(&mut buffer));
        while let Some(entry) = found.next_entry().map_err(broken)? {
            let name = String::from_utf8_lossy(entry.file_path().as_ref()).into_owned();
            if entry.compression_method() != CompressionMethod::STORE {
                return Err(damaged(
                    path,
                    &format!("{name} is compressed, and no entry of a package is"),
                ));
            }
            // The folder of the archive has the name that the file had when it was written.
            let name = name.split_once('/').map_or("", |(_, rest)| rest);
            entries.push((name.to_owned(), entry.wayfinder()));
        }
        if entries.len() as u64 != archive.entries_hint() {
            return Err(damaged(path, "entries are missing"));
        }
        Ok(Package {
            path: path.into(),
            archive,
            entries,
        })
    }

    /// What the package says about itself.
    ///
    /// # Errors
    /// It says nothing, or in another form.
    pub(crate) fn about(&self) -> Result<About, Failure> {
        const NAME: &str = "extra/pp/package.json";
        let path = self.path.display();
        if !self.entries.iter().any(|(name, _)| name == NAME) {
            return Err(Failure::invalid(format!(
                "{path} does not say which tensors it takes; write it with pp_pipeline.export"
            )));
        }
        let about: About = serde_json::from_slice(&self.read(NAME)?)
            .map_err(|error| damaged(&self.path, &format!("{NAME}: {error}")))?;
        if about.format != FORMAT {
            return Err(Failure::invalid(format!(
                "{path} is a package of form {}, and this plugin reads form {FORMAT}; write it with the pp_pipeline of the \
                 plugin's version",
                about.format
            )));
        }
        match about.parts.is_empty() {
            true => Err(damaged(&self.path, "it has no parts")),
            false => Ok(about),
        }
    }

    /// The bytes of an entry.
    ///
    /// # Errors
    /// It is not there, or damaged.
    pub(crate) fn read(&self, name: &str) -> Result<Vec<u8>, Failure> {
        let found = self.entries.iter().find(|(of, _)| of == name);
        let (_, entry) =
            found.ok_or_else(|| damaged(&self.path, &format!("there is no {name}")))?;
        let mut bytes = Vec::new();
        self.copy(name, *entry, &mut bytes, MOST_BYTES)?;
        Ok(bytes)
    }

    fn copy(
        &self,
        name: &str,
        entry: ZipArchiveEntryWayfinder,
        to: &mut impl io::Write,
        most: u64,
    ) -> Result<(), Failure> {
        let broken =
            |error: &dyn std::fmt::Display| damaged(&self.path, &format!("{name}: {error}"));
        let entry = self
            .archive
            .get_entry(entry)
            .map_err(|error| broken(&error))?;
        // It compares length and checksum when the entry ends.
        let reader = entry.verifying_reader(entry.reader());
        io::copy(&mut reader.take(most), to).map_err(|error| broken(&error))?;
        Ok(())
    }

    /// Copies what AOTInductor made of a part into a new folder, or into one of this path, and gives the folder and the library in it.
    ///
    /// # Errors
    /// An entry is damaged or missing; the folder for temporary files is full or cannot be written.
    pub(crate) fn unpack(
        &self,
        part: usize,
        again: Option<&Path>,
    ) -> Result<(Folder, PathBuf), Failure> {
        let folder = again.map_or_else(Folder::new, Folder::at)?;
        let prefix = format!("data/aotinductor/part{part}/");
        let mut library = None;
        for (name, entry) in &self.entries {
            let Some(file) = name.strip_prefix(&prefix).filter(|file| !file.is_empty()) else {
                continue;
            };
            if file.contains('/') || file.ends_with(".cpp") {
                continue;
            }
            let to = folder.0.join(file);
            let made = File::create_new(&to);
            let mut made = made.map_err(|error| Folder::refused(&to, &error))?;
            self.copy(name, *entry, &mut made, u64::MAX)?;
            if file.ends_with(".so") {
                library = Some(to);
            }
        }
        let library =
            library.ok_or_else(|| damaged(&self.path, &format!("{prefix} has no library")))?;
        Ok((folder, library))
    }
}

/// A folder of this user alone, which goes with what lies in it.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    fn new() -> Result<Folder, Failure> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = format!("pp-aoti-{}-{number}", std::process::id());
            let path = std::env::temp_dir().join(name);
            // A process of the same number may have left one.
            if !path.exists() {
                return Self::at(&path);
            }
        }
    }

    /// Makes the folder, which must not be there: another user's would be theirs to change.
    fn at(path: &Path) -> Result<Folder, Failure> {
        let made = DirBuilder::new().mode(0o700).create(path);
        made.map_err(|error| Self::refused(path, &error))?;
        Ok(Folder(path.into()))
    }

    fn refused(path: &Path, error: &io::Error) -> Failure {
        Failure::error(format!(
            "{} cannot be written: {error}; TMPDIR names another folder for temporary files",
            path.display()
        ))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// A package of one part, whose library is no library.
    fn package(compression: CompressionMethod) -> Vec<u8> {
        let mut archive = rawzip::ZipArchiveWriter::new(Vec::new());
        let about = r#"{"format": 1, "torch": "2.15.0", "device": "cpu", "example": {"frames": 2}, "parts": [{
            "inputs": [{"name": "latents_in", "dtype": "bf16", "dims": ["frames", 4, 64]}], "tolerance": 0.01,
            "output": {"name": "latents_out", "dtype": "bf16", "dims": ["frames", 4, 64]}}]}"#;
        for (name, bytes) in [
            ("x/extra/pp/package.json", about),
            ("x/data/aotinductor/part0/a.so", "code"),
        ] {
            let made = archive.new_file(name).compression_method(compression);
            let (mut entry, config) = made.start().unwrap();
            let mut writer = config.wrap(&mut entry);
            writer.write_all(bytes.as_bytes()).unwrap();
            let (_, descriptor) = writer.finish().unwrap();
            entry.finish(descriptor).unwrap();
        }
        archive.finish().unwrap()
    }

    fn read(bytes: &[u8]) -> Result<(About, Vec<u8>), Failure> {
        let folder = Folder::new().unwrap();
        let path = folder.0.join("a.pt2");
        fs::write(&path, bytes).unwrap();
        let package = Package::open(&path)?;
        let (unpacked, library) = package.unpack(0, None)?;
        assert_eq!(unpacked.0.metadata().unwrap().mode() & 0o777, 0o700);
        Ok((package.about()?, fs::read(library).unwrap()))
    }

    #[test]
    fn a_package_is_read_whole_or_refused_wherever_it_ends_or_was_changed() {
        let whole = package(CompressionMethod::STORE);
        let (about, library) = read(&whole).unwrap();
        assert_eq!(library, b"code");
        let sizes = Sizes {
            frames: 3,
            steps: 0,
        };
        let spec = about.parts[0].output.spec(sizes).unwrap();
        assert_eq!(spec.shape().dims(), [3, 4, 64]);
        for end in 0..whole.len() {
            let error = read(&whole[..end]).unwrap_err();
            assert!(
                error.message.contains("cut off or damaged"),
                "{end}: {error}"
            );
        }
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 0x10;
            // A change of what no one reads, such as a date, is none.
            if let Ok((found, library)) = read(&changed) {
                assert_eq!(
                    (format!("{found:?}"), &library[..]),
                    (format!("{about:?}"), &b"code"[..])
                );
            }
        }
        let error = read(&package(CompressionMethod::DEFLATE)).unwrap_err();
        assert!(error.message.contains("is compressed"), "{error}");
    }
}
