// Devices of the stand-in: what they allocate, and copies to the host that arrive late.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <limits>
#include <mutex>
#include <set>

namespace stand_in {

constexpr c10::DeviceType kNpu = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 4;

inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local c10::StreamId current_stream[kDevices] = {};
inline std::atomic<int64_t> operator_calls{0};

inline c10::DeviceIndex index_of(c10::Device device) {
  auto index = device.has_index() ? device.index() : current_device;
  TORCH_CHECK(index < kDevices, "Invalid NPU device ID: ", static_cast<int>(index));
  return index;
}

// ---- memory -------------------------------------------------------------------------------------------------------

struct Memory {
  std::atomic<int64_t> allocated{0}, peak{0}, limit{0};
  void take(int64_t bytes) {
    auto most = limit.load();
    TORCH_CHECK_WITH(OutOfMemoryError, !most || allocated + bytes <= most, "NPU out of memory. Tried to allocate ",
                     bytes, " bytes");
    auto now = allocated += bytes;
    auto before = peak.load();
    while (now > before && !peak.compare_exchange_weak(before, now)) {
    }
  }
  void give(int64_t bytes) { allocated -= bytes; }
};
inline Memory memory[kDevices];

// Host memory that counts as memory of a device: `keep` holds it for as long as somebody uses it.
template <class Keep>
c10::DataPtr on_device(void* data, Keep keep, size_t bytes, c10::DeviceIndex device) {
  struct Held {
    Keep keep;
    int64_t bytes;
    c10::DeviceIndex device;
  };
  memory[device].take(static_cast<int64_t>(bytes));
  auto* held = new Held{std::move(keep), static_cast<int64_t>(bytes), device};
  auto drop = [](void* context) {
    auto* held = static_cast<Held*>(context);
    memory[held->device].give(held->bytes);
    delete held;
  };
  return c10::DataPtr(data, held, drop, c10::Device(kNpu, device));
}

inline c10::DataPtr allocate(size_t bytes, c10::DeviceIndex device) {
  auto host = c10::GetCPUAllocator()->allocate(bytes);
  void* data = host.get();
  return on_device(data, std::move(host), bytes, device);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override { return stand_in::allocate(bytes, current_device); }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
inline DeviceAllocator device_allocator;

// Pinned host memory: ordinary memory whose address is remembered.
struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto host = c10::GetCPUAllocator()->allocate(bytes);
    void* data = host.get();
    {
      std::lock_guard<std::mutex> guard(lock);
      pinned[data] = bytes;
    }
    struct Held {
      PinnedAllocator* owner;
      c10::DataPtr host;
    };
    auto drop = [](void* context) {
      auto* held = static_cast<Held*>(context);
      {
        std::lock_guard<std::mutex> guard(held->owner->lock);
        held->owner->pinned.erase(held->host.get());
      }
      delete held;
    };
    return c10::DataPtr(data, new Held{this, std::move(host)}, drop, c10::Device(c10::kCPU));
  }
  bool holds(const void* data) {
    std::lock_guard<std::mutex> guard(lock);
    auto after = pinned.upper_bound(const_cast<void*>(data));
    if (after == pinned.begin()) return false;
    auto found = std::prev(after);
    return data < static_cast<char*>(found->first) + std::max<size_t>(found->second, 1);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  std::mutex lock;
  std::map<void*, size_t> pinned;
};
inline PinnedAllocator pinned_allocator;

// ---- copies that arrive late -----------------------------------------------------------------------------------------

// A non-blocking copy to the host holds wrong numbers until somebody waits for it, as on a device that is behind.
class LateCopies {
 public:
  int64_t add(const at::Tensor& values, const at::Tensor& target) {
    std::lock_guard<std::mutex> guard(lock_);
    waiting_.push_back({++last_, values, target});
    return last_;
  }
  int64_t last() const { return last_; }
  // Let arrive what was asked for up to `number`.
  void arrive(int64_t number = std::numeric_limits<int64_t>::max()) {
    std::vector<Copy> ready;
    {
      std::lock_guard<std::mutex> guard(lock_);
      while (!waiting_.empty() && waiting_.front().number <= number) {
        ready.push_back(std::move(waiting_.front()));
        waiting_.pop_front();
      }
    }
    at::AutoDispatchBelowADInplaceOrView below;
    for (auto& copy : ready) copy.target.copy_(copy.values);
  }

 private:
  struct Copy {
    int64_t number;
    at::Tensor values, target;
  };
  std::mutex lock_;
  std::deque<Copy> waiting_;
  std::atomic<int64_t> last_{0};
};
inline LateCopies late_copies[kDevices];

inline void spoil(const at::Tensor& target) {
  if (target.is_floating_point() || target.is_complex())
    target.fill_(std::numeric_limits<double>::quiet_NaN());
  else if (target.scalar_type() == at::kBool)
    target.logical_not_();
  else
    target.fill_(113);
}

// ---- streams and events ------------------------------------------------------------------------------------------------

struct RecordedEvent {
  c10::DeviceIndex device = 0;
  int64_t copies = 0;
  std::chrono::steady_clock::time_point time;
};

// Work runs at once, in the order of the program: streams differ in name alone.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kNpu; }
  c10::Device getDevice() const override { return c10::Device(kNpu, current_device); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.type() == kNpu, "expected a device npu, got ", device);
    current_device = index_of(device);
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream named(c10::Device device, c10::StreamId id) const {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kNpu, index_of(device)), id);
  }
  c10::Stream getStream(c10::Device device) const override { return named(device, current_stream[index_of(device)]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return named(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> made{0};
    return named(device, ++made);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override { late_copies[stream.device_index()].arrive(); }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    late_copies[device < 0 ? current_device : device].arrive();
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new RecordedEvent;
    auto device = stream.device_index();
    *static_cast<RecordedEvent*>(*event) = {device, late_copies[device].last(), std::chrono::steady_clock::now()};
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (auto* recorded = static_cast<RecordedEvent*>(event)) late_copies[recorded->device].arrive(recorded->copies);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<RecordedEvent*>(event);
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    std::chrono::duration<double, std::milli> passed =
        static_cast<RecordedEvent*>(to)->time - static_cast<RecordedEvent*>(from)->time;
    return passed.count();
  }
};

}  // namespace stand_in
