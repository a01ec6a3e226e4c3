// Every operator on npu tensors runs as the CPU's, on the same memory.
//
// 1. Each npu argument is given to the CPU kernel as a CPU tensor over the very same bytes (an alias).
// 2. The CPU kernel runs. Operators that have a CPU kernel and a composite one take the CPU's (see `stand_in.cpp`): what
//    they compute equals the CPU's to the bit.
// 3. What the kernel changed of its arguments (bytes, sizes, a new storage) is written back.
// 4. A result that is an argument, or a view of one, comes back as that; anything else becomes a tensor on npu.
//
// Refused as on a device: tensors of several devices, but for scalars of the host; a generator of another device.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "random.h"

namespace stand_in {

class Call {
 public:
  explicit Call(std::string name) : name_(std::move(name)) {}

  at::Tensor host(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != kNpu) {
      host_given_ |= tensor.device().is_cpu() && tensor.dim() > 0;
      return tensor;
    }
    place(tensor.device().index());
    for (auto& pair : tensors_)
      if (pair.npu.is_same(tensor)) return pair.host;
    auto alias = at::detail::make_tensor<c10::TensorImpl>(
        host(tensor.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    set_shape(alias, tensor);
    tensors_.push_back({tensor, alias});
    return alias;
  }

  c10::Storage host(const c10::Storage& storage) {
    for (auto& pair : storages_)
      if (pair.npu.is_alias_of(storage)) return pair.host;
    auto* impl = storage.unsafeGetStorageImpl();
    auto drop = [](void* context) { delete static_cast<c10::Storage*>(context); };
    c10::DataPtr data(impl->mutable_data(), new c10::Storage(storage), drop, c10::Device(c10::kCPU));
    c10::Storage alias(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), impl->nbytes(),
                                                             std::move(data), c10::GetCPUAllocator(), true));
    storages_.push_back({storage, alias});
    return alias;
  }

  // A device that an argument names.
  void place(c10::DeviceIndex device) {
    TORCH_CHECK(device_ < 0 || device_ == device,
                "Expected all tensors to be on the same device, but found at least two devices, npu:",
                static_cast<int>(device_), " and npu:", static_cast<int>(device), "! (", name_, ")");
    device_ = device;
  }
  c10::DeviceIndex device() const { return device_ < 0 ? current_device : device_; }

  void refuse_mixed() const {
    static const std::set<std::string> mixed = {"aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_"};
    TORCH_CHECK(!host_given_ || tensors_.empty() || mixed.count(name_),
                "Expected all tensors to be on the same device, but found at least two devices, npu:",
                static_cast<int>(device()), " and cpu! (", name_, ")");
  }

  void write_back() {
    auto known = storages_;  // `npu` adds to them
    for (auto& pair : known) {
      auto* impl = pair.npu.unsafeGetStorageImpl();
      if (impl->data() == pair.host.data()) continue;
      Hooks().resizePrivateUse1Bytes(pair.npu, pair.host.nbytes());
      std::memcpy(impl->mutable_data(), pair.host.data(), pair.host.nbytes());
    }
    for (auto& pair : tensors_) {
      auto storage = npu(pair.host.storage());
      if (!storage.is_alias_of(pair.npu.storage())) pair.npu.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
      set_shape(pair.npu, pair.host);
    }
  }

  at::Tensor npu(const at::Tensor& result) {
    if (!result.defined() || !result.device().is_cpu()) return result;
    for (auto& pair : tensors_)
      if (pair.host.is_same(result)) return pair.npu;
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        npu(result.storage()), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), result.dtype());
    set_shape(made, result);
    return made;
  }

 private:
  struct Tensors {
    at::Tensor npu, host;
  };
  struct Storages {
    c10::Storage npu, host;
  };
  std::string name_;
  std::vector<Tensors> tensors_;
  std::vector<Storages> storages_;
  c10::DeviceIndex device_ = -1;
  bool host_given_ = false;

  c10::Storage npu(const c10::Storage& storage) {
    for (auto& pair : storages_)
      if (pair.host.is_alias_of(storage)) return pair.npu;
    auto data = on_device(const_cast<void*>(storage.data()), storage, storage.nbytes(), device());
    c10::Storage made(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
                                                            std::move(data), &device_allocator, true));
    storages_.push_back({made, storage});
    return made;
  }

  static void set_shape(const at::Tensor& to, const at::Tensor& from) {
    auto* impl = to.unsafeGetTensorImpl();
    if (to.sizes() != from.sizes() || to.strides() != from.strides() ||
        to.storage_offset() != from.storage_offset()) {
      auto before = impl->allow_tensor_metadata_change();
      impl->set_allow_tensor_metadata_change(true);
      impl->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
      impl->set_allow_tensor_metadata_change(before);
    }
    if (to.is_conj() != from.is_conj()) impl->_set_conj(from.is_conj());
    if (to.is_neg() != from.is_neg()) impl->_set_neg(from.is_neg());
  }
};

inline void take_argument(Call& call, c10::IValue& value) {
  if (value.isTensor()) {
    value = call.host(value.toTensor());
  } else if (value.isTensorList()) {
    std::vector<at::Tensor> found;
    for (const auto& tensor : value.toTensorVector()) found.push_back(call.host(tensor));
    value = c10::List<at::Tensor>(found);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> found;
    for (std::optional<at::Tensor> tensor : value.toOptionalTensorList())
      found.push_back(tensor ? std::optional<at::Tensor>(call.host(*tensor)) : tensor);
    value = found;
  } else if (value.isStorage() && value.toStorage().device().type() == kNpu) {
    call.place(value.toStorage().device().index());
    value = call.host(value.toStorage());
  } else if (value.isDevice() && value.toDevice().type() == kNpu) {
    call.place(index_of(value.toDevice()));
    value = c10::Device(c10::kCPU);
  }
}

inline void give_result(Call& call, c10::IValue& value) {
  if (value.isTensor()) {
    value = call.npu(value.toTensor());
  } else if (value.isTensorList()) {
    std::vector<at::Tensor> found;
    for (const auto& tensor : value.toTensorVector()) found.push_back(call.npu(tensor));
    value = c10::List<at::Tensor>(found);
  }
}

// Operators without a generator argument draw from the CPU's default one: it lends the state of npu's meanwhile.
class DrawsFromNpu {
 public:
  DrawsFromNpu(bool active, c10::DeviceIndex device) : active_(active), npu_(host_generator(default_generator(device))) {
    if (!active_) return;
    before_ = cpu_.get_state();
    cpu_.set_state(npu_.get_state());
  }
  ~DrawsFromNpu() {
    if (!active_) return;
    npu_.set_state(cpu_.get_state());
    cpu_.set_state(before_);
  }

 private:
  bool active_;
  at::Generator npu_;
  at::Generator cpu_ = at::detail::getDefaultCPUGenerator();
  at::Tensor before_;
};

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  operator_calls++;
  const auto& schema = op.schema();
  auto name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  auto* arguments = stack->data() + stack->size() - schema.arguments().size();
  Call call(name);
  for (size_t i = 0; i < schema.arguments().size(); i++) take_argument(call, arguments[i]);
  call.refuse_mixed();
  TORCH_CHECK_NOT_IMPLEMENTED(op.hasKernelForDispatchKey(c10::DispatchKey::CPU), name,
                              ": the stand-in computes what the CPU has a kernel for, and it has none for this");
  if (name == "aten::_local_scalar_dense") late_copies[call.device()].arrive();
  bool drawn = false;
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    bool absent = arguments[i].isNone() && schema.arguments()[i].type()->repr_str() == "Generator?";
    if (!arguments[i].isGenerator() && !absent) continue;
    arguments[i] = host_generator(absent ? default_generator(call.device()) : arguments[i].toGenerator());
    drawn = true;
  }
  {
    DrawsFromNpu draws(!drawn && op.hasTag(at::Tag::nondeterministic_seeded), call.device());
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  call.write_back();
  auto* results = stack->data() + stack->size() - schema.returns().size();
  for (size_t i = 0; i < schema.returns().size(); i++) give_result(call, results[i]);
}

}  // namespace stand_in
