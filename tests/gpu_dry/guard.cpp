// For fake CUDA tensors in a CPU build of torch: a device guard that does nothing, and hooks that say that CUDA was built.
// Without them autograd aborts the process. Load it before `import torch`, since torch keeps the hooks that it finds first.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
struct Guard : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device here() { return Device(DeviceType::CUDA, 0); }
  static Stream only() { return Stream(Stream::DEFAULT, here()); }
  Device exchangeDevice(Device) const override { return here(); }
  Device getDevice() const override { return here(); }
  Stream getStream(Device) const noexcept override { return only(); }
  Stream getDefaultStream(Device) const override { return only(); }
  Stream getNewStream(Device, int = 0) const override { return only(); }
  Stream exchangeStream(Stream) const noexcept override { return only(); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
namespace at {
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return false; }
  bool hasCUDA() const override { return false; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  bool isPinnedPtr(const void*) const override { return true; }
  void init() const override {}
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}
// Whether torch has taken both.
extern "C" int install() {
  static Guard guard;
  auto& slot = impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)];
  if (!slot.load()) slot.store(&guard);
  return slot.load() == &guard && at::detail::getCUDAHooks().isBuilt();
}
