#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <atomic>
#include <new>
namespace {
using namespace c10;
using Report = void (*)(int what, int64_t which, int64_t stream);
thread_local int64_t current = 0;
std::atomic<int64_t> events{1};
Report report = nullptr;
void say(int what, int64_t which, int64_t stream) { if (report) report(what, which, stream); }
const Device here(DeviceType::CUDA, 0);
Stream stream_of(int64_t id) { return Stream(Stream::UNSAFE, here, id); }
struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return here; }
  Device getDevice() const override { return here; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const noexcept override { return stream_of(current); }
  Stream getDefaultStream(Device) const override { return stream_of(0); }
  Stream exchangeStream(Stream to) const noexcept override { auto from = stream_of(current); current = to.id(); return from; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const Stream& stream, const DeviceIndex, const EventFlag) const override {
    if (!*event) *event = reinterpret_cast<void*>(events++);
    say(0, reinterpret_cast<int64_t>(*event), stream.id());
  }
  void block(void* event, const Stream& stream) const override { say(1, reinterpret_cast<int64_t>(event), stream.id()); }
  void recordDataPtrOnStream(const DataPtr& data, const Stream& stream) const override {
    say(2, reinterpret_cast<int64_t>(&data), stream.id());
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& s) const override { say(3, 0, s.id()); }
  void synchronizeDevice(const DeviceIndex) const override { say(4, 0, 0); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  void deviceSynchronize(DeviceIndex) const override {}
};
}
extern "C" {
void start(Report to) {
  report = to;
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();
}
void set_stream(int64_t stream) { current = stream; }
int64_t get_stream() { return current; }
int64_t storage_of(int64_t data) {
  static StorageImpl any(StorageImpl::use_byte_size_t(), 0, DataPtr(nullptr, here), nullptr, false);
  const auto offset = reinterpret_cast<int64_t>(&any.data_ptr()) - reinterpret_cast<int64_t>(&any);
  return data - offset;
}
}
