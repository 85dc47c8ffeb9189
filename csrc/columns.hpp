// Arguments of the bindings that take columns of a batch, one value for each request.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

template <class T>
using In = nanobind::ndarray<const T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
template <class T>
using Out = nanobind::ndarray<T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
