// Random numbers of the stand-in, and what torch asks an accelerator about itself.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "device.h"

namespace stand_in {

// A generator that says npu and draws from a CPU generator of its own.
struct Generator final : c10::GeneratorImpl {
  at::Generator host;
  explicit Generator(c10::DeviceIndex device, at::Generator drawn = at::make_generator<at::CPUGeneratorImpl>())
      : GeneratorImpl(c10::Device(kNpu, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(std::move(drawn)) {}
  static c10::DeviceType device_type() { return kNpu; }
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override { return new Generator(device().index(), host.clone()); }
};

inline at::Generator& host_generator(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == kNpu, "Expected a 'npu' device type for generator but found '",
              generator.device().type(), "'");
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->host;
}

inline const at::Generator& default_generator(c10::DeviceIndex device) {
  static const std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (c10::DeviceIndex i = 0; i < kDevices; i++) made.push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all[device < 0 ? current_device : device];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice(c10::Device(kNpu, device)); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice(c10::Device(kNpu, device)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  at::Device getDeviceFromPtr(void*) const override { return Guard().getDevice(); }
  bool isPinnedPtr(const void* data) const override { return pinned_allocator.holds(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto data = allocate(bytes, impl->device().index());
    std::memcpy(data.get(), impl->data(), std::min(bytes, impl->nbytes()));
    impl->set_data_ptr(std::move(data));
    impl->set_nbytes(bytes);
  }
};

}  // namespace stand_in
