// The only file that knows Python. Everything it binds is plain C++ from the headers.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "allocators.hpp"
#include "guarded_copy.hpp"
#include "heap.hpp"
#include "peer.hpp"
#include "scan.hpp"
#include "scattered.hpp"

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

// The array's owner is the Python object.
Bytes array_over(char *data, std::uint64_t nbytes, nb::handle self) {
  const std::size_t shape[1] = {nbytes};
  return Bytes(data, 1, shape, self, nullptr, nb::dtype<std::uint8_t>(), nb::device::cpu::value);
}

Bytes array_of(nb::handle_t<Block> self) {
  const Block &block = *nb::inst_ptr<Block>(self);
  return array_over(block.data(), block.nbytes, self);
}

// Dies without the GIL: unmapping takes milliseconds. Lives and dies with it held. Its own memory is
// let go of with it held, so that no other object can be there before nanobind has forgotten this one.
struct HeldScattered {
  explicit HeldScattered(std::unique_ptr<Scattered> it) : it(std::move(it)) {}
  HeldScattered(const HeldScattered &) = delete;
  HeldScattered &operator=(const HeldScattered &) = delete;
  ~HeldScattered() {
    const nb::gil_scoped_release unlocked;
    it.reset();
  }

  std::unique_ptr<Scattered> it;
};

std::unique_ptr<HeldScattered> allocate_scattered(Heap &heap, std::int64_t nbytes) {
  std::unique_ptr<Scattered> made;
  {
    const nb::gil_scoped_release unlocked;
    made = Scattered::allocate(heap, nbytes);
  }
  return made ? std::make_unique<HeldScattered>(std::move(made)) : nullptr;
}

Bytes array_of_scattered(nb::handle_t<HeldScattered> self) {
  const Scattered &scattered = *nb::inst_ptr<HeldScattered>(self)->it;
  return array_over(scattered.data(), scattered.nbytes, self);
}

std::optional<std::vector<std::pair<std::uint64_t, std::uint64_t>>> alloc_scattered(
    Allocator &self, std::int64_t nbytes) {
  const auto pieces = self.alloc_scattered(nbytes);
  if (!pieces) return std::nullopt;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> found;
  for (const Piece &piece : *pieces) found.emplace_back(piece.offset, piece.nbytes);
  return found;
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
      .def("alloc_scattered", &alloc_scattered, "nbytes"_a)
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
  nb::class_<HeldScattered>(m, "Scattered", "Memory of a heap in several blocks, freed with its last view.")
      .def_prop_ro("nbytes", [](const HeldScattered &self) { return self.it->nbytes; })
      .def_prop_ro("pieces",
                   [](const HeldScattered &self) {
                     std::vector<std::pair<std::uint64_t, std::uint64_t>> found;
                     for (const auto &block : self.it->blocks()) {
                       found.emplace_back(block->offset, block->nbytes);
                     }
                     return found;
                   })
      .def("array", &array_of_scattered, "The bytes, without a copy.");
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
      .def("allocate_scattered", &allocate_scattered, "nbytes"_a)
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
