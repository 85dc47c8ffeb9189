// Arguments and results of the bindings: columns of a batch, one value for each
// request, and other arrays.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <utility>
#include <vector>

template <class T>
using In = nanobind::ndarray<const T, nanobind::ndim<1>, nanobind::c_contig,
                             nanobind::device::cpu>;
template <class T>
using Out =
    nanobind::ndarray<T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

template <class T>
nanobind::object owned(std::vector<T>&& values) {
  auto* kept = new std::vector<T>(std::move(values));
  nanobind::capsule owner(
      kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nanobind::cast(nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<1>>(
      kept->data(), {kept->size()}, owner));
}
