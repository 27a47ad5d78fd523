// The only file that knows Python. Everything it binds is plain C++ from the headers.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "scan.hpp"

namespace nb = nanobind;
using Floats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;

NB_MODULE(_core, m) {
  m.doc() = "Native core of st2i_dask.";
  m.def(
      "scan",
      [](const Floats &values) {
        st2i::Scan s;
        {
          nb::gil_scoped_release unlocked;
          s = st2i::scan(values.data(), values.size());
        }
        return nb::make_tuple(s.minimum, s.maximum, s.nonfinite);
      },
      nb::arg("values").noconvert(),
      "Range and non-finite count of a C-contiguous float32 CPU array, in one pass without the GIL.");
}
