// A device "npu" for torch that computes on the CPU (PrivateUse1), and a process group "hccl": for tests alone.
#include <torch/csrc/utils/pybind.h>

#include "hccl.h"

using at::Tensor;
using c10::DispatchKey;

namespace c10 {
REGISTER_ALLOCATOR(stand_in::kNpu, &stand_in::device_allocator);
}
namespace at {
REGISTER_HOST_ALLOCATOR(stand_in::kNpu, &stand_in::pinned_allocator);
}

namespace stand_in {

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

// ---- what no CPU kernel does ---------------------------------------------------------------------------------------

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  auto source = Call("copy_").host(from), target = Call("copy_").host(to);
  at::AutoDispatchBelowADInplaceOrView below;
  if (from.device().type() == kNpu && to.device().is_cpu()) {
    auto& late = late_copies[from.device().index()];
    if (non_blocking) {
      late.add(source.to(target.scalar_type(), false, true), target);
      spoil(target);
      return to;
    }
    late.arrive();
  }
  target.copy_(source);
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  Call call("_copy_from_and_resize");
  auto target = call.host(to), source = Call("_copy_from_and_resize").host(from);
  at::AutoDispatchBelowADInplaceOrView below;
  target.resize_(source.sizes());
  target.copy_(source);
  call.write_back();
  return to;
}

Tensor convolution(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, c10::SymIntArrayRef stride,
                   c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                   c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  Call call("convolution");
  auto input = call.host(x), kernel = call.host(weight);
  std::optional<Tensor> added;
  if (bias && bias->defined()) added = call.host(*bias);
  at::AutoDispatchBelowADInplaceOrView below;
  return call.npu(at::convolution_symint(input, kernel, added, stride, padding, dilation, transposed, output_padding,
                                         std::move(groups)));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& gradient, const Tensor& x, const Tensor& weight,
                                                        c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
                                                        c10::SymIntArrayRef dilation, bool transposed,
                                                        c10::SymIntArrayRef output_padding, c10::SymInt groups,
                                                        std::array<bool, 3> wanted) {
  Call call("convolution_backward");
  std::vector<c10::SymInt> bias{transposed ? weight.sym_size(1) * groups : weight.sym_size(0)};
  auto above = call.host(gradient), input = call.host(x), kernel = call.host(weight);
  at::AutoDispatchBelowADInplaceOrView below;
  auto [dx, dw, db] =
      at::convolution_backward_symint(above, input, kernel, c10::SymIntArrayRef(bias), stride, padding, dilation,
                                      transposed, output_padding, std::move(groups), wanted);
  return {call.npu(dx), call.npu(dw), call.npu(db)};
}

bool shallow_copy(const Tensor&, const Tensor&) { return true; }  // Module.to keeps its Parameters
void record_stream(Tensor&, c10::Stream) {}

// An operator with a CPU kernel and a composite one would take the composite, whose last bits differ from the CPU's.
bool must_be_named(const c10::OperatorHandle& op) {
  auto has = [&](DispatchKey key) { return op.hasKernelForDispatchKey(key); };
  return has(DispatchKey::CPU) && !has(DispatchKey::PrivateUse1) &&
         (has(DispatchKey::CompositeImplicitAutograd) || has(DispatchKey::CompositeExplicitAutograd) ||
          has(DispatchKey::CompositeExplicitAutogradNonFunctional));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_has_compatible_shallow_copy_type", shallow_copy);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = c10::Dispatcher::singleton().findOp(name);
    if (!op || !op->hasSchema() || !must_be_named(*op)) continue;
    auto overload = name.overload_name.empty() ? "" : "." + name.overload_name;
    m.impl((name.name.substr(6) + overload).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace stand_in

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using stand_in::Hccl;
  using stand_in::memory;
  auto backend = py::module::import("torch._C._distributed_c10d").attr("Backend");
  py::class_<Hccl, c10::intrusive_ptr<Hccl>>(m, "ProcessGroupHCCL", backend)
      .def(py::init<c10::intrusive_ptr<c10d::Backend>>());
  m.attr("devices") = static_cast<int>(stand_in::kDevices);
  m.def("calls", [] { return stand_in::operator_calls.load(); });
  m.def("allocated", [](int device) { return memory[device].allocated.load(); });
  m.def("peak", [](int device) { return memory[device].peak.load(); });
  m.def("reset_peak", [](int device) { memory[device].peak = memory[device].allocated.load(); });
  m.def("limit", [](int device, int64_t bytes) { memory[device].limit = bytes; }, "0 for none");
  m.def("default_generator", [](int device) { return stand_in::default_generator(device); });
}
