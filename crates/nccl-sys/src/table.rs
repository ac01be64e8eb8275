//! What the generated table can do. bindgen's own functions panic when a symbol is missing, so they are left out.

/// Gives the table [`crate::Symbols`] its functions; the generated file calls it with the names of all symbols.
macro_rules! table {
    ($table:ident: $($symbol:ident)*) => {
        impl $table {
            /// Looks every function up. Those that are missing become errors.
            ///
            /// # Safety
            ///
            /// A symbol of the library that has the name of one of NCCL's functions must have that function's type.
            pub(crate) unsafe fn of(library: ::libloading::Library) -> $table {
                // SAFETY: the caller vouches for the types; the table owns the library, so the pointers stay valid.
                unsafe {
                    $table {
                        $($symbol: library.get(stringify!($symbol)).map(|symbol| *symbol),)*
                        __library: library,
                    }
                }
            }
        }
    };
}

pub(crate) use table;
