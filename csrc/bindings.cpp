// The only file that knows Python. Everything it binds is plain C++ from the headers.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include "allocators.hpp"
#include "guarded_copy.hpp"
#include "heap.hpp"
#include "peer.hpp"
#include "scan.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace st2i;
using Floats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<nb::array_api, std::uint8_t>;
using NoGil = nb::call_guard<nb::gil_scoped_release>;

namespace {

// OSError with its errno, so that Python picks FileNotFoundError and the like.
void translate(const std::exception_ptr &thrown, void *) {
  try {
    std::rethrow_exception(thrown);
  } catch (const std::system_error &error) {
    const nb::object made = nb::steal(
        PyObject_CallFunction(PyExc_OSError, "is", error.code().value(), error.what()));
    if (made.is_valid()) PyErr_SetObject(made.type().ptr(), made.ptr());
  }
}

nb::dict as_dict(const Statistics &s) {
  nb::dict found;
  found["used"] = s.used;
  found["free"] = s.free;
  found["largest_free"] = s.largest_free;
  found["blocks"] = s.blocks;
  found["peak"] = s.peak;
  return found;
}

// Called without the GIL.
void let_signals_through() {
  const nb::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

template <typename Owner>
std::optional<std::uint32_t> wait_for(const Owner &owner, std::int64_t word, std::int64_t at_least,
                                      double timeout_s) {
  return st2i::wait(owner.word(word), checked_value(at_least), timeout_s, let_signals_through);
}

template <typename Owner>
std::uint32_t value_of(const Owner &owner, std::int64_t word) {
  return owner.word(word).load(std::memory_order_acquire);
}

// The array's owner is the Python object of the block.
Bytes array_of(nb::handle_t<Block> self) {
  const Block &block = *nb::inst_ptr<Block>(self);
  const std::size_t shape[1] = {block.nbytes};
  return Bytes(block.data(), 1, shape, self, nullptr, nb::dtype<std::uint8_t>(), nb::device::cpu::value);
}

void bind_scan(nb::module_ &m) {
  m.def(
      "scan",
      [](const Floats &values) {
        Scan s;
        {
          nb::gil_scoped_release unlocked;
          s = scan(values.data(), values.size());
        }
        return nb::make_tuple(s.minimum, s.maximum, s.nonfinite);
      },
      nb::arg("values").noconvert(),
      "Range and non-finite count of a C-contiguous float32 CPU array, in one pass without the GIL.");
}

void bind_copy(nb::module_ &m) {
  m.def(
      "copy",
      [](std::uint64_t into_address, std::uint64_t from_address, std::uint64_t nbytes) {
        guarded_copy(reinterpret_cast<char *>(into_address),
                     reinterpret_cast<const char *>(from_address), nbytes);
      },
      "into_address"_a, "from_address"_a, "nbytes"_a, NoGil());
}

void bind_allocator(nb::module_ &m) {
  m.attr("GRANULE") = kGranule;
  nb::class_<Allocator>(m, "Allocator", "Divides an arena that lies elsewhere.")
      .def(nb::new_([](std::int64_t nbytes, const std::string &kind) {
             return make_allocator(kind, nbytes);
           }),
           "nbytes"_a, "kind"_a = "best_fit")
      .def_prop_ro("nbytes", &Allocator::nbytes)
      .def("alloc", &Allocator::alloc, "nbytes"_a)
      .def("free", &Allocator::free, "offset"_a)
      .def("statistics", [](const Allocator &self) { return as_dict(self.statistics()); })
      .def("_check", &Allocator::check);
}

void bind_heap(nb::module_ &m) {
  nb::class_<Block>(m, "Block", "Memory of a heap, freed with its last view.")
      .def_ro("offset", &Block::offset)
      .def_ro("nbytes", &Block::nbytes)
      .def_ro("generation", &Block::generation)
      .def("array", &array_of, "The bytes, without a copy.");
  nb::class_<Heap>(m, "Heap", "A process's own part of a symmetric heap in host memory.")
      .def(nb::new_(&Heap::create), "nbytes"_a, "name"_a, "allocator"_a = "best_fit",
           "poison"_a = false)
      .def_prop_ro("name", &Heap::name)
      .def_prop_ro("pid", &Heap::pid)
      .def_prop_ro("fd", &Heap::fd)
      .def_prop_ro("nbytes", &Heap::nbytes)
      .def_prop_ro("base",
                   [](const Heap &self) { return reinterpret_cast<std::uint64_t>(self.payload()); })
      .def("allocate", &Heap::allocate, "nbytes"_a, NoGil())
      .def("find", &Heap::find, "address"_a)
      .def("statistics",
           [](const Heap &self) {
             nb::dict found = as_dict(self.statistics());
             found["taken"] = self.taken();
             return found;
           })
      .def("allocate_word", &Heap::allocate_word)
      .def("free_word", &Heap::free_word, "word"_a)
      .def("signal",
           [](const Heap &self, std::int64_t word, std::int64_t value) {
             st2i::signal(self.word(word), checked_value(value));
           },
           "word"_a, "value"_a)
      .def("value", &value_of<Heap>, "word"_a)
      .def("wait", &wait_for<Heap>, "word"_a, "at_least"_a, "timeout_s"_a, NoGil())
      .def("_check", &Heap::check);
}

void bind_peer(nb::module_ &m) {
  nb::class_<Peer>(m, "Peer", "Another process's heap, for reading.")
      .def(nb::init<int, int, const std::string &>(), "pid"_a, "fd"_a, "name"_a)
      .def_prop_ro("nbytes", &Peer::nbytes)
      .def("get",
           [](Peer &self, std::int64_t offset, std::uint64_t generation, std::int64_t nbytes,
              std::uint64_t into_address) {
             return self.get(offset, generation, nbytes, reinterpret_cast<char *>(into_address));
           },
           "offset"_a, "generation"_a, "nbytes"_a, "into_address"_a, NoGil())
      .def("value", &value_of<Peer>, "word"_a)
      .def("wait", &wait_for<Peer>, "word"_a, "at_least"_a, "timeout_s"_a, NoGil());
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "Native core of st2i_dask.";
  // A tensor that is alive at exit keeps its block: no leak.
  nb::set_leak_warnings(false);
  nb::register_exception_translator(translate);
  bind_scan(m);
  bind_copy(m);
  bind_allocator(m);
  bind_heap(m);
  bind_peer(m);
}
