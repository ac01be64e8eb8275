//! Functions of a library that is opened at run time, as a table of pointers.
//!
//! Hazard: cudarc's own functions panic when the library lacks them, and give result codes as Rust enums: a code that a
//! newer library invents is none of their values, and undefined behaviour once it is returned. So cudarc's types are
//! used for structs and constants alone; a code is a number here, and a function that is missing is an error.

/// Declares a table of functions, each of which returns a result code, and `look_up`, which fills it.
///
/// The crate that uses it depends on libloading.
#[macro_export]
macro_rules! functions {
    ($(#[$about:meta])* $table:ident { $($name:ident($($argument:ty),* $(,)?);)* }) => {
        $(#[$about])*
        #[expect(non_snake_case, reason = "the library's names")]
        pub(crate) struct $table {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) -> ::std::ffi::c_int,)*
        }

        impl $table {
            /// The functions, or the name of the first that is missing.
            ///
            /// # Safety
            /// What the library has under these names are functions of these types, and it is never unloaded.
            pub(crate) unsafe fn look_up(
                library: &::libloading::Library,
            ) -> Result<Self, &'static str> {
                Ok(Self {
                    $($name: {
                        let symbol = concat!(stringify!($name), "\0").as_bytes();
                        // SAFETY: the caller's duty.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn($($argument),*) -> ::std::ffi::c_int>(
                                symbol,
                            )
                        };
                        *found.map_err(|_| stringify!($name))?
                    },)*
                })
            }
        }

        impl ::std::fmt::Debug for $table {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.write_str(stringify!($table))
            }
        }
    };
}
