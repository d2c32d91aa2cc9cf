// A device that is not there, as strict as one that is: PyTorch's PrivateUse1 backend over host memory.
//
// Memory. What tensors of the device point to is never accessible (PROT_NONE). The same pages are mapped once more, at an
// address that kernels alone know. Every allocation has pages of its own; what is freed is filled with NaN in the order of
// its stream, and its address is never used again. Pinned memory is the host's, but for the pages of a copy that the host
// has not waited for: those it is filled into are inaccessible, those it reads are read-only. Whoever touches wrong memory
// gets SIGSEGV.
//
// Streams. Each is a thread that carries out its kernels in order, after delays at random. Every kernel of PyTorch that this
// file does not have runs on the CPU, on the stream's thread, with aliases of its tensors.
//
// Order. Streams, events and the host have vector clocks. A kernel that is ordered against another by nothing, where one of
// them writes what the other uses, is a fault, whichever has come first; to free memory is to write it. So a wrong order is
// found each time, not only where the delays bring it about.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <fcntl.h>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>

namespace {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr size_t PAGE = 4096;
constexpr size_t ROOM = size_t(1) << 37;    // addresses of each kind of memory
constexpr size_t FREED = size_t(64) << 20;  // bytes that stay filled with NaN
const c10::Device DEVICE(TYPE, 0);

// ---- Order: vector clocks ----

struct Clock {  // by stream, the number of its kernels that have come before
  std::vector<uint64_t> of;
  uint64_t at(size_t stream) const { return stream < of.size() ? of[stream] : 0; }
  void join(const Clock& other) {
    if (of.size() < other.of.size()) of.resize(other.of.size());
    for (size_t i = 0; i < other.of.size(); ++i) of[i] = std::max(of[i], other.of[i]);
  }
  void set(size_t stream, uint64_t number) {
    if (of.size() <= stream) of.resize(stream + 1);
    of[stream] = number;
  }
};

struct Access {
  uintptr_t low, high;  // bytes
  bool write;
};

struct Record {
  Access bytes;
  size_t stream;
  uint64_t number;
  std::string what;
};

struct Job {
  std::string what;
  std::function<void()> run;
};

struct Queue {  // a stream
  std::deque<Job> jobs;
  uint64_t told = 0, done = 0;
  Clock clock;
  std::mt19937 random;
  double delay = 0;  // seconds before every kernel; else at random
};

struct Event {
  size_t stream = 0;
  uint64_t number = 0;  // 0: has never been recorded
  Clock clock;
  std::shared_ptr<std::chrono::steady_clock::time_point> when;
};

// ---- Memory ----

struct Region {  // pages of a file, mapped for the host and for kernels
  int file = -1;
  char *host = nullptr, *device = nullptr;
  size_t used = 0;
  void make(int host_may) {
    file = memfd_create("phantom", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, ROOM) == 0, "no memory file");
    host = static_cast<char*>(mmap(nullptr, ROOM, host_may, MAP_SHARED | MAP_NORESERVE, file, 0));
    device = static_cast<char*>(mmap(nullptr, ROOM, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0));
    TORCH_CHECK(host != MAP_FAILED && device != MAP_FAILED, "no addresses");
  }
  bool has(const void* p) const { return p >= host && p < host + ROOM; }
  void drop(size_t offset, size_t size) {
    fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(offset), off_t(size));
  }
};

struct Block {
  size_t size = 0;
  size_t stream = 0;                // that it has been allocated on
  std::set<size_t> others;          // that it is recorded to be used on
  std::vector<Record> records;      // of what uses it that the host has not waited for
};

struct Pending {  // a copy from or to pinned memory that the host has not waited for
  Access bytes;
  size_t stream;
  uint64_t number;
};

size_t pages(size_t size) { return (size + PAGE - 1) / PAGE * PAGE; }

struct Machine {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Queue> queues;
  Clock host;  // what any thread of the host has waited for
  Region memory, pinned;
  std::map<uintptr_t, Block> blocks;
  std::vector<Pending> pending;
  std::deque<std::pair<size_t, size_t>> freed;  // (offset, size) of NaN
  size_t freed_bytes = 0, bytes = 0, peak = 0, limit = size_t(4) << 30;
  uint64_t synchronisations = 0;
  double most = 100e-6;  // seconds of a delay at random
  std::vector<std::string> faults;
  std::map<std::string, uint64_t> kernels;

  Machine() {
    memory.make(PROT_NONE);
    pinned.make(PROT_READ | PROT_WRITE);
    add_queue();
    add_queue();  // 1: frees what several streams have used
  }

  void fault(const std::string& text) {
    if (faults.size() < 100 && std::find(faults.begin(), faults.end(), text) == faults.end()) faults.push_back(text);
  }

  size_t add_queue() {
    size_t number = queues.size();
    queues.emplace_back();
    queues.back().random.seed(unsigned(number));
    std::thread([this, number] { serve(number); }).detach();
    return number;
  }

  void serve(size_t number) {
    at::set_num_threads(1);
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    at::NoGradGuard no_grad;
    std::unique_lock lock(mutex);
    Queue& queue = queues[number];
    while (true) {
      changed.wait(lock, [&] { return !queue.jobs.empty(); });
      Job job = std::move(queue.jobs.front());
      queue.jobs.pop_front();
      double delay = queue.delay;
      if (delay == 0 && queue.random() % 4 == 0) delay = most * double(queue.random() % 1000) / 1000;
      lock.unlock();
      if (delay > 0) std::this_thread::sleep_for(std::chrono::duration<double>(delay));
      std::string failure;
      try {
        job.run();
      } catch (const std::exception& error) {
        failure = error.what();
        failure = failure.substr(0, failure.find('\n'));
      }
      job.run = nullptr;  // what it keeps may free memory, which takes the lock
      lock.lock();
      if (!failure.empty()) fault("kernel " + job.what + " has failed: " + failure);
      ++queue.done;
      changed.notify_all();
    }
  }

  // Give a stream something to do; with the lock. Returns its number.
  uint64_t tell(size_t stream, const std::string& what, const std::vector<Access>& uses, std::function<void()> run) {
    Queue& queue = queues[stream];
    uint64_t number = ++queue.told;
    queue.clock.join(host);
    queue.clock.set(stream, number);
    for (const Access& each : uses) use(each, stream, number, what);
    queue.jobs.push_back({what, std::move(run)});
    changed.notify_all();
    return number;
  }

  Block* block_at(uintptr_t address, uintptr_t* start = nullptr) {
    auto after = blocks.upper_bound(address);
    if (after == blocks.begin()) return nullptr;
    --after;
    if (start) *start = after->first;
    return address < after->first + after->second.size ? &after->second : nullptr;
  }

  // The kernel uses these bytes: whoever else does must come before it, by its stream's clock.
  void use(const Access& bytes, size_t stream, uint64_t number, const std::string& what) {
    if (bytes.low >= bytes.high) return;
    Block* block = block_at(bytes.low);
    if (block == nullptr) {
      fault("use after release: " + what + " on stream " + std::to_string(stream) + " uses memory that has been freed");
      return;
    }
    const Clock& clock = queues[stream].clock;
    std::vector<Record> left;
    for (Record& other : block->records) {
      bool overlaps = other.bytes.low < bytes.high && bytes.low < other.bytes.high;
      bool before = other.number <= clock.at(other.stream);
      if (overlaps && !before && (other.bytes.write || bytes.write)) {
        bool frees = what == "release";
        fault(
            (frees ? "use after release: " : "race: ") + other.what + " on stream " + std::to_string(other.stream) +
            (frees ? " is not ordered before the release of its memory on stream " : " and " + what + " on stream ") +
            std::to_string(stream));
      }
      bool covered = bytes.low <= other.bytes.low && other.bytes.high <= bytes.high && before &&
          (bytes.write || !other.bytes.write);
      if (!covered && other.number > host.at(other.stream)) left.push_back(std::move(other));
    }
    left.push_back({bytes, stream, number, what});
    block->records = std::move(left);
  }

  bool is_done(size_t stream, uint64_t number) { return queues[stream].done >= number; }

  // The host has waited for what has this clock.
  void join_host(const Clock& clock) {
    host.join(clock);
    std::vector<Pending> left, over;
    for (const Pending& each : pending) (each.number <= host.at(each.stream) ? over : left).push_back(each);
    pending = std::move(left);
    for (const Pending& each : over) protect(each.bytes, PROT_READ | PROT_WRITE);
    if (!over.empty())
      for (const Pending& each : pending) protect(each.bytes, each.bytes.write ? PROT_NONE : PROT_READ);
  }

  void protect(const Access& bytes, int how) {  // whole pages alone: others have something else beside it
    uintptr_t low = (bytes.low + PAGE - 1) / PAGE * PAGE, high = bytes.high / PAGE * PAGE;
    if (low < high) TORCH_CHECK(mprotect(reinterpret_cast<void*>(low), high - low, how) == 0, "mprotect");
  }

  void await(std::unique_lock<std::mutex>& lock, size_t stream, uint64_t number) {
    changed.wait(lock, [&] { return is_done(stream, number); });
  }

  void synchronize(size_t stream) {
    std::unique_lock lock(mutex);
    ++synchronisations;
    Clock clock = queues[stream].clock;
    await(lock, stream, queues[stream].told);
    join_host(clock);
  }

  void* allocate(Region& region, size_t size, size_t stream) {
    std::lock_guard lock(mutex);
    if (&region == &memory && bytes + size > limit)
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "phantom out of memory: tried to allocate ", size, " bytes, ", bytes, " of ", limit,
          " are in use");
    char* address = region.host + region.used;
    region.used += pages(size);
    TORCH_CHECK(region.used < ROOM, "the phantom has no addresses left");
    Block block;
    block.size = size;
    block.stream = stream;
    auto start = reinterpret_cast<uintptr_t>(address);
    if (&region == &memory) {
      bytes += size;
      peak = std::max(peak, bytes);
      memset(region.device + (address - region.host), 0xff, size);
      // Another stream may use it only behind what this one has been told: it may have been given what that frees.
      block.records.push_back({{start, start + size, true}, stream, queues[stream].told, "allocation"});
    }
    blocks[start] = std::move(block);
    return address;
  }

  void release(void* address) {
    std::lock_guard lock(mutex);
    auto start = reinterpret_cast<uintptr_t>(address);
    Block& block = blocks[start];
    size_t size = block.size;
    if (pinned.has(address)) {
      std::vector<Pending> left;
      for (const Pending& each : pending)
        if (each.bytes.high <= start || start + size <= each.bytes.low) left.push_back(each);
      pending = std::move(left);
      protect({start, start + pages(size), true}, PROT_READ | PROT_WRITE);
      pinned.drop(size_t(static_cast<char*>(address) - pinned.host), pages(size));
      blocks.erase(start);
      return;
    }
    bytes -= size;
    size_t offset = size_t(static_cast<char*>(address) - memory.host), stream = block.stream;
    std::vector<std::pair<size_t, uint64_t>> first;  // streams and numbers that come before
    if (!block.others.empty()) {
      Clock clock = queues[stream].clock;
      first.emplace_back(stream, queues[stream].told);
      for (size_t other : block.others) {
        clock.join(queues[other].clock);
        first.emplace_back(other, queues[other].told);
      }
      stream = 1;
      queues[stream].clock.join(clock);
    }
    tell(stream, "release", {{start, start + size, true}}, [this, offset, size, first] {
      {
        std::unique_lock wait(mutex);
        for (auto [other, number] : first) await(wait, other, number);
      }
      memset(memory.device + offset, 0xff, size);
      std::lock_guard again(mutex);
      freed.emplace_back(offset, pages(size));
      freed_bytes += pages(size);
      while (freed_bytes > FREED) {
        memory.drop(freed.front().first, freed.front().second);
        freed_bytes -= freed.front().second;
        freed.pop_front();
      }
    });
    blocks.erase(start);
  }
};

Machine& machine() {
  static Machine* made = new Machine();  // for ever: its threads outlive what would end it
  return *made;
}

thread_local size_t current = 0;  // stream

c10::Stream stream_of(size_t number) { return c10::Stream(c10::Stream::UNSAFE, DEVICE, c10::StreamId(number)); }

struct Memory final : c10::DeviceAllocator {
  static void free(void* address) { if (address) machine().release(address); }
  c10::DataPtr allocate(size_t size) override {
    void* address = size ? machine().allocate(machine().memory, size, current) : nullptr;
    return {address, address, &free, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "the host cannot copy it"); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    std::lock_guard lock(machine().mutex);
    Block* block = machine().block_at(reinterpret_cast<uintptr_t>(data.get()));
    if (block && block->stream != size_t(stream.id())) block->others.insert(size_t(stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard lock(machine().mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = int64_t(machine().bytes);
    stats.allocated_bytes[0].peak = int64_t(machine().peak);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard lock(machine().mutex);
    machine().peak = machine().bytes;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) {
    std::lock_guard lock(machine().mutex);
    return {machine().limit - machine().bytes, machine().limit};
  }
};

struct Pinned final : at::HostAllocator {
  static void free(void* address) { if (address) machine().release(address); }
  c10::DataPtr allocate(size_t size) override {
    void* address = size ? machine().allocate(machine().pinned, size, 0) : nullptr;
    return {address, address, &free, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* target, const void* source, size_t size) const override { memcpy(target, source, size); }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // copies keep what they use
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

Memory device_memory;
Pinned pinned_memory;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device device) const override { TORCH_CHECK(device.index() <= 0, "there is one phantom alone"); }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const { return {}; }
  c10::Stream getStream(c10::Device) const override { return stream_of(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getNewStream(c10::Device, int = 0) const override {
    std::lock_guard lock(machine().mutex);
    return stream_of(machine().add_queue());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override { return getNewStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(std::exchange(current, size_t(stream.id())));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event();
    auto when = std::make_shared<std::chrono::steady_clock::time_point>();
    Machine& m = machine();
    std::lock_guard lock(m.mutex);
    auto number = size_t(stream.id());
    auto told = m.tell(number, "event", {}, [when] { *when = std::chrono::steady_clock::now(); });
    *static_cast<Event*>(*event) = {number, told, m.queues[number].clock, when};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event || !static_cast<Event*>(event)->number) return;
    Event copy = *static_cast<Event*>(event);
    Machine& m = machine();
    std::lock_guard lock(m.mutex);
    m.queues[size_t(stream.id())].clock.join(copy.clock);
    m.tell(size_t(stream.id()), "wait", {}, [copy] {
      std::unique_lock wait(machine().mutex);
      machine().await(wait, copy.stream, copy.number);
    });
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto& found = *static_cast<Event*>(event);
    std::lock_guard lock(machine().mutex);
    bool done = machine().is_done(found.stream, found.number);
    if (done) machine().join_host(found.clock);
    return done;
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    Event copy = *static_cast<Event*>(event);
    std::unique_lock lock(machine().mutex);
    ++machine().synchronisations;
    machine().await(lock, copy.stream, copy.number);
    machine().join_host(copy.clock);
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    auto seconds = *static_cast<Event*>(second)->when - *static_cast<Event*>(first)->when;
    return std::chrono::duration<double, std::milli>(seconds).count();
  }
  bool queryStream(const c10::Stream& stream) const override {
    std::lock_guard lock(machine().mutex);
    Queue& queue = machine().queues[size_t(stream.id())];
    if (queue.done < queue.told) return false;
    machine().join_host(queue.clock);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override { machine().synchronize(size_t(stream.id())); }
  void synchronizeDevice(c10::DeviceIndex) const override {
    size_t streams;
    {
      std::lock_guard lock(machine().mutex);
      streams = machine().queues.size();
    }
    for (size_t each = 0; each < streams; ++each) machine().synchronize(each);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_memory.recordStream(data, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- Kernels ----

struct View {  // a tensor of the device, as a kernel takes it: nothing of it is kept alive
  void* address;
  std::vector<int64_t> sizes, strides;
  at::ScalarType type;

  explicit View(const at::Tensor& t)
      : address(t.numel() ? const_cast<void*>(t.const_data_ptr()) : nullptr), sizes(t.sizes().vec()),
        strides(t.strides().vec()), type(t.scalar_type()) {
    TORCH_CHECK(!t.is_conj() && !t.is_neg(), "the phantom has no lazy conjugates");
  }
  at::Tensor on_stream() const {
    void* here = address;
    for (Region* region : {&machine().memory, &machine().pinned})
      if (region->has(address)) here = region->device + (static_cast<char*>(address) - region->host);
    return at::from_blob(here, sizes, strides, at::TensorOptions().dtype(type));
  }
  Access access(bool write) const {
    int64_t last = 0, elements = 1;
    for (size_t i = 0; i < sizes.size(); ++i) {
      elements *= sizes[i];
      last += (sizes[i] - 1) * strides[i];
    }
    auto low = reinterpret_cast<uintptr_t>(address);
    return {low, elements ? low + uintptr_t(last + 1) * c10::elementSize(type) : low, write};
  }
};

bool is_ours(const at::Tensor& t) { return t.defined() && t.device().type() == TYPE; }

// What a kernel keeps of an argument.
using Kept = std::function<c10::IValue()>;

struct Call {
  std::vector<Kept> arguments;
  std::vector<Access> uses;

  void add(const c10::IValue& value, bool write, const std::string& op) {
    if (value.isTensor()) {
      arguments.push_back(tensor(value.toTensor(), write, op));
    } else if (value.isTensorList()) {
      std::vector<Kept> each;
      for (const at::Tensor& t : value.toTensorVector()) each.push_back(tensor(t, write, op));
      arguments.push_back([each] {
        c10::List<at::Tensor> list;
        for (const Kept& t : each) list.push_back(t().toTensor());
        return c10::IValue(list);
      });
    } else if (value.isOptionalTensorList()) {
      std::vector<Kept> each;
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector())
        each.push_back(t ? tensor(*t, write, op) : Kept([] { return c10::IValue(); }));
      arguments.push_back([each] {
        c10::List<std::optional<at::Tensor>> list;
        for (const Kept& t : each) {
          c10::IValue v = t();
          list.push_back(v.isNone() ? std::optional<at::Tensor>() : v.toTensor());
        }
        return c10::IValue(list);
      });
    } else {
      c10::IValue kept = value.isDevice() ? c10::IValue(c10::Device(c10::DeviceType::CPU)) : value;
      arguments.push_back([kept] { return kept; });
    }
  }

  Kept tensor(const at::Tensor& t, bool write, const std::string& op) {
    if (!t.defined()) return [t] { return c10::IValue(t); };
    if (!is_ours(t)) {
      TORCH_CHECK(t.dim() == 0 && !write, op, ": a tensor of the ", t.device(), " among those of the phantom");
      at::Tensor copy = t.detach().clone();
      if (t.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
      return [copy] { return c10::IValue(copy); };
    }
    View view(t);
    uses.push_back(view.access(write));
    return [view] { return c10::IValue(view.on_stream()); };
  }

  torch::jit::Stack stack() const {
    torch::jit::Stack made;
    for (const Kept& each : arguments) made.push_back(each());
    return made;
  }
};

uint64_t enqueue(const std::string& what, const std::vector<Access>& uses, std::function<void()> run) {
  std::lock_guard lock(machine().mutex);
  ++machine().kernels[what];
  return machine().tell(current, what, uses, std::move(run));
}

at::Tensor meta_of(const at::Tensor& t) {
  return t.defined() ? at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::DeviceType::Meta)) : t;
}

c10::IValue meta_of(const c10::IValue& value) {
  auto ours = [](const at::Tensor& t) { return is_ours(t) ? meta_of(t) : t; };
  if (value.isTensor()) return ours(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : value.toTensorVector()) list.push_back(ours(t));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector())
      list.push_back(t ? std::optional<at::Tensor>(ours(*t)) : t);
    return list;
  }
  return value.isDevice() ? c10::IValue(c10::Device(c10::DeviceType::Meta)) : value;
}

at::Tensor like(const at::Tensor& t) {  // of the device; with the sizes, strides and type of `t`
  return t.defined() ? at::empty_strided(t.sizes(), t.strides(), t.options().device(DEVICE).pinned_memory(false)) : t;
}

c10::IValue like(const c10::IValue& value, std::vector<at::Tensor>& made) {
  if (value.isTensor()) {
    made.push_back(like(value.toTensor()));
    return made.back();
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : value.toTensorVector()) list.push_back(like(c10::IValue(t), made).toTensor());
    return list;
  }
  return value;
}

std::vector<at::Tensor> tensors_in(const torch::jit::Stack& stack) {
  std::vector<at::Tensor> found;
  for (const c10::IValue& value : stack) {
    if (value.isTensor()) found.push_back(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& t : value.toTensorVector()) found.push_back(t);
  }
  return found;
}

// Outputs that are given empty get the size of the result.
void size_outputs(const c10::OperatorHandle& op, const std::vector<c10::IValue>& given) {
  std::vector<size_t> empty;
  for (size_t i = 0; i < given.size(); ++i) {
    const auto* alias = op.schema().arguments()[i].alias_info();
    if (alias && alias->isWrite() && given[i].isTensor() && is_ours(given[i].toTensor()) && !given[i].toTensor().numel())
      empty.push_back(i);
  }
  if (empty.empty()) return;
  torch::jit::Stack shapes;
  for (const auto& each : given) shapes.push_back(meta_of(each));
  torch::jit::Stack call = shapes;
  op.callBoxed(&call);
  for (size_t i : empty)
    if (shapes[i].toTensor().sizes() != given[i].toTensor().sizes()) given[i].toTensor().resize_(shapes[i].toTensor().sizes());
}

// Run an operation that this file does not have on the CPU, on the stream's thread.
void on_stream(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  std::string name = schema.name().substr(schema.name().find("::") + 2);
  if (!schema.overload_name().empty()) name += "." + schema.overload_name();
  size_t count = schema.arguments().size();
  auto given = torch::jit::last(*stack, count).vec();
  size_outputs(op, given);
  Call call;
  for (size_t i = 0; i < count; ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    call.add(given[i], alias && alias->isWrite(), name);
  }
  torch::jit::Stack results;
  bool in_place = !schema.returns().empty() || schema.is_mutable();
  for (const auto& returned : schema.returns()) {
    const auto* alias = returned.alias_info();
    TORCH_CHECK(!alias || alias->isWrite(), name, ": the phantom does not know this view");
    if (!alias) in_place = false;
    for (size_t i = 0; alias && i < count; ++i) {
      const auto* theirs = schema.arguments()[i].alias_info();
      if (theirs && theirs->beforeSets() == alias->beforeSets()) results.push_back(given[i]);
    }
  }
  if (in_place) {
    enqueue(name, call.uses, [op, call] {
      auto made = call.stack();
      op.callBoxed(&made);
    });
    torch::jit::drop(*stack, count);
    for (auto& each : results) stack->push_back(each);
    return;
  }
  TORCH_CHECK(results.empty(), name, ": some results are arguments, others not");
  static std::mutex shapeless_mutex;
  // Operations the sizes of whose results nobody knows before they have run, or has them otherwise on the CPU.
  static std::set<std::string> shapeless{"_embedding_bag", "_embedding_bag_forward_only"};
  bool known = true;
  for (const auto& returned : schema.returns())
    known = known && (returned.type()->kind() == c10::TypeKind::TensorType || returned.type()->kind() == c10::TypeKind::ListType);
  {
    std::lock_guard lock(shapeless_mutex);
    known = known && !shapeless.count(name);
  }
  torch::jit::Stack shapes;
  if (known) {
    try {
      for (const auto& each : given) shapes.push_back(meta_of(each));
      op.callBoxed(&shapes);
    } catch (const std::exception&) {
      std::lock_guard lock(shapeless_mutex);
      shapeless.insert(name);
      known = false;
    }
  }
  if (!known) {  // the host waits, as it does on any device
    auto found = std::make_shared<torch::jit::Stack>();
    auto failed = std::make_shared<std::string>();
    enqueue(name, call.uses, [op, call, found, failed] {
      try {
        *found = call.stack();
        op.callBoxed(&*found);
      } catch (const std::exception& error) {
        *failed = error.what();
      }
    });
    machine().synchronize(current);
    TORCH_CHECK(failed->empty(), *failed);
    shapes = *found;
  }
  std::vector<at::Tensor> outputs;
  for (const auto& each : shapes) results.push_back(like(each, outputs));
  std::vector<View> views;
  for (const at::Tensor& t : outputs)
    if (t.defined()) {
      views.emplace_back(t);
      call.uses.push_back(views.back().access(true));
    }
  auto fill = [views](const torch::jit::Stack& made) {
    size_t next = 0;
    for (const at::Tensor& t : tensors_in(made))
      if (t.defined()) views.at(next++).on_stream().copy_(t);
  };
  if (known)
    enqueue(name, call.uses, [op, call, fill] {
      auto made = call.stack();
      op.callBoxed(&made);
      fill(made);
    });
  else
    enqueue(name + ".results", {call.uses.end() - ptrdiff_t(views.size()), call.uses.end()}, [shapes, fill] { fill(shapes); });
  torch::jit::drop(*stack, count);
  for (auto& each : results) stack->push_back(each);
}

c10::TensorOptions options_of(std::optional<at::ScalarType> type) {
  return at::TensorOptions().dtype(type.value_or(at::get_default_dtype_as_scalartype())).device(DEVICE);
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      type.value_or(at::get_default_dtype_as_scalartype()), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      type.value_or(at::get_default_dtype_as_scalartype()));
}

void resize_bytes(c10::StorageImpl* storage, size_t size) {
  if (size == storage->nbytes()) return;
  c10::DataPtr data = device_memory.allocate(size);
  size_t kept = std::min(size, storage->nbytes());
  if (kept) {
    auto source = reinterpret_cast<uintptr_t>(storage->data()), target = reinterpret_cast<uintptr_t>(data.get());
    char* base = machine().memory.device - reinterpret_cast<uintptr_t>(machine().memory.host);
    enqueue("resize", {{source, source + kept, false}, {target, target + kept, true}}, [base, source, target, kept] {
      memcpy(base + target, base + source, kept);
    });
  }
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(size);
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t needed = size_t(self.storage_offset() + self.numel()) * self.element_size();
  if (needed > self.storage().nbytes()) resize_bytes(self.storage().unsafeGetStorageImpl(), needed);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() && stride.size() == size.size()) impl->set_sizes_and_strides(size, stride);
  else impl->set_sizes_contiguous(size);
  return self;
}

at::Tensor& set_whole(at::Tensor& self, at::Storage source) {
  auto elements = int64_t(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, elements, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  Machine& m = machine();
  if (target.numel() == 0) return target;
  if (is_ours(source) && is_ours(target)) {
    View from(source), to(target);
    enqueue("copy", {from.access(false), to.access(true)}, [from, to] { to.on_stream().copy_(from.on_stream()); });
    return target;
  }
  at::Tensor there = is_ours(source) ? target : source;
  bool to_host = is_ours(source);
  bool pinned = m.pinned.has(there.const_data_ptr());
  std::string what = to_host ? "copy to the host" : "copy to the device";
  if (!pinned && !to_host) there = source.detach().clone();  // staged at once
  View from(to_host ? source : there), to(to_host ? there : target);
  std::vector<Access> uses{(to_host ? from : to).access(!to_host)};
  if (pinned) uses.push_back((to_host ? to : from).access(to_host));
  auto run = [from, to, there]() mutable {
    to.on_stream().copy_(from.on_stream());
    there.reset();
  };
  {
    std::lock_guard lock(m.mutex);
    ++m.kernels[what];
    uint64_t number = m.tell(current, what, uses, run);
    if (pinned) {
      m.pending.push_back({uses[1], current, number});
      m.protect(uses[1], to_host ? PROT_NONE : PROT_READ);
    }
  }
  if (!non_blocking || (to_host && !pinned)) m.synchronize(current);
  return target;
}

at::Scalar item(const at::Tensor& self) {
  View view(self);
  auto found = std::make_shared<at::Scalar>();
  enqueue("item", {view.access(false)}, [view, found] { *found = view.on_stream().item(); });
  machine().synchronize(current);
  return *found;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_memory.recordStream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_stream>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<at::Tensor (*)(const at::Tensor&, c10::IntArrayRef)>(&at::native::view));
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage", &set_whole);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &item);
  m.impl("record_stream", &record_stream);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* data) const override { return machine().pinned.has(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Device getDeviceFromPtr(void*) const override { return DEVICE; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    resize_bytes(storage.unsafeGetStorageImpl(), size);
  }
};

bool registered = [] {
  machine();
  c10::SetAllocator(TYPE, &device_memory);
  at::setHostAllocator(TYPE, &pinned_memory);
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  namespace py = pybind11;
  module.def("faults", [] {
    std::lock_guard lock(machine().mutex);
    return std::exchange(machine().faults, {});
  });
  module.def("delay", [](size_t stream, double seconds) {
    std::lock_guard lock(machine().mutex);
    machine().queues.at(stream).delay = seconds;
  });
  module.def("set_most", [](double seconds) {
    std::lock_guard lock(machine().mutex);
    machine().most = seconds;
  });
  module.def("set_limit", [](size_t bytes) {
    std::lock_guard lock(machine().mutex);
    machine().limit = bytes;
  });
  module.def("memory_info", [] { return device_memory.getMemoryInfo(0); });
  module.def("synchronisations", [] {
    std::lock_guard lock(machine().mutex);
    return std::exchange(machine().synchronisations, 0);
  });
  module.def("kernels", [] {
    std::lock_guard lock(machine().mutex);
    return std::exchange(machine().kernels, {});
  });
}
