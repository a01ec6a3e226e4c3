// The process group "hccl": gloo on the memory of npu tensors. Tensors of the host are refused, as HCCL does.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "fallback.h"

namespace stand_in {

class Hccl : public c10d::Backend {
  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  c10::intrusive_ptr<c10d::Backend> gloo_;

  static at::Tensor host(const at::Tensor& tensor) {
    TORCH_CHECK(tensor.device().type() == kNpu, "HCCL: tensors must be on npu, got one on ", tensor.device());
    return Call("hccl").host(tensor);
  }
  static Tensors host(const Tensors& tensors) {
    Tensors found;
    for (const auto& tensor : tensors) found.push_back(host(tensor));
    return found;
  }
  static TensorLists host(const TensorLists& lists) {
    TensorLists found;
    for (const auto& list : lists) found.push_back(host(list));
    return found;
  }

 public:
  explicit Hccl(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "hccl"; }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }

  Work broadcast(Tensors& x, const c10d::BroadcastOptions& o) override {
    auto a = host(x);
    return gloo_->broadcast(a, o);
  }
  Work allreduce(Tensors& x, const c10d::AllreduceOptions& o) override {
    auto a = host(x);
    return gloo_->allreduce(a, o);
  }
  Work allreduce_coalesced(Tensors& x, const c10d::AllreduceCoalescedOptions& o) override {
    auto a = host(x);
    return gloo_->allreduce_coalesced(a, o);
  }
  Work reduce(Tensors& x, const c10d::ReduceOptions& o) override {
    auto a = host(x);
    return gloo_->reduce(a, o);
  }
  Work allgather(TensorLists& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    auto a = host(out);
    auto b = host(in);
    return gloo_->allgather(a, b, o);
  }
  Work _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override {
    auto a = host(out), b = host(in);
    return gloo_->_allgather_base(a, b, o);
  }
  Work allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    auto a = host(out), b = host(in);
    return gloo_->allgather_into_tensor_coalesced(a, b, o);
  }
  Work gather(TensorLists& out, Tensors& in, const c10d::GatherOptions& o) override {
    auto a = host(out);
    auto b = host(in);
    return gloo_->gather(a, b, o);
  }
  Work scatter(Tensors& out, TensorLists& in, const c10d::ScatterOptions& o) override {
    auto a = host(out);
    auto b = host(in);
    return gloo_->scatter(a, b, o);
  }
  Work reduce_scatter(Tensors& out, TensorLists& in, const c10d::ReduceScatterOptions& o) override {
    auto a = host(out);
    auto b = host(in);
    return gloo_->reduce_scatter(a, b, o);
  }
  Work _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    auto a = host(out), b = host(in);
    return gloo_->_reduce_scatter_base(a, b, o);
  }
  Work reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    auto a = host(out), b = host(in);
    return gloo_->reduce_scatter_tensor_coalesced(a, b, o);
  }
  Work alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
                     const c10d::AllToAllOptions& o) override {
    auto a = host(out), b = host(in);
    return gloo_->alltoall_base(a, b, out_sizes, in_sizes, o);
  }
  Work alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& o) override {
    auto a = host(out), b = host(in);
    return gloo_->alltoall(a, b, o);
  }
  Work send(Tensors& x, int to, int tag) override {
    auto a = host(x);
    return gloo_->send(a, to, tag);
  }
  Work recv(Tensors& x, int from, int tag) override {
    auto a = host(x);
    return gloo_->recv(a, from, tag);
  }
  Work barrier(const c10d::BarrierOptions& given) override {
    auto options = given;
    options.device = std::nullopt;
    return gloo_->barrier(options);
  }
};

}  // namespace stand_in
