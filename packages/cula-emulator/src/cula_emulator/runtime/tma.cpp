#include "tma.h"

namespace emu {

namespace {

struct TensorMap {
  uint64_t base, stride[4];  // stride[i] of dimension i + 1, bytes
  uint32_t size[5], box[5], rank, element_bytes, type;
  Swizzle swizzle;
  bool nan_fill, tf32;  // outside elements are NaN; loads round fp32 to tf32
};

enum MapType : uint32_t {
  kMapU32 = 2,
  kMapS32 = 3,
  kMapU64 = 4,
  kMapS64 = 5,
  kMapF16 = 6,
  kMapF32 = 7,
  kMapF64 = 9,
  kMapBf16 = 10
};

TensorMap decode_map(const uint8_t* p) {
  static const uint32_t sizes[16] = {1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4, 0, 0, 0};
  static const Swizzle swizzles[4] = {Swizzle::kNone, Swizzle::k32, Swizzle::k64, Swizzle::k128};
  uint64_t q[8];
  memcpy(q, p, sizeof q);
  const uint32_t flags = (uint32_t)q[1];
  TensorMap m;
  m.base = q[0];
  m.rank = ((flags >> 4) & 7) + 1;
  m.type = (flags >> 7) & 15;
  m.element_bytes = sizes[m.type];
  const uint32_t atom = (flags >> 19) & 3;  // 0: 16-byte units are permuted, 1: 32-byte units
  m.swizzle = swizzles[(flags >> 13) & 3];
  if (atom == 1 && m.swizzle == Swizzle::k128) m.swizzle = Swizzle::k128Atom32;
  m.nan_fill = (flags >> 15) & 1;
  m.tf32 = (flags >> 16) & 1;
  if ((q[6] >> 32) & 0xffffff) fail(Fault::kInvalid, "tensor map with traversal strides");
  if (m.rank > 5 || !m.element_bytes || ((flags >> 11) & 3) || atom > 1)
    fail(Fault::kInvalid, "this is not a tiled tensor map (flags 0x%x)", flags);
  const uint64_t low[4] = {q[1] >> 32, q[2] & 0xffffffff, q[2] >> 32, q[3] & 0xffffffff};
  for (int i = 0; i < 4; i++) m.stride[i] = (low[i] | ((q[3] >> (32 + 4 * i)) & 15) << 32) << 4;
  for (int i = 0; i < 5; i++) m.size[i] = (uint32_t)(q[4 + i / 2] >> (32 * (i % 2))) + 1;
  m.box[0] = (uint32_t)(q[6] >> 56) + 1;
  for (int i = 1; i < 5; i++) m.box[i] = (uint32_t)((q[7] >> (8 * (i - 1))) & 255) + 1;
  return m;
}

// To nearest even, subnormals kept, as an H200 loads through a tf32 map.
void round_to_tf32(uint8_t* words, uint32_t bytes) {
  for (uint32_t i = 0; i < bytes; i += 4) {
    const uint32_t u = load<uint32_t>(words + i);
    const bool nan = (u & 0x7fffffff) > 0x7f800000;
    store<uint32_t>(words + i, nan ? 0x7fffe000u : (u + 0xfff + (u >> 13 & 1)) & ~0x1fffu);
  }
}

Element reduce_type(uint32_t type) {
  switch (type) {
    case kMapU32: return Element::kU32;
    case kMapS32: return Element::kS32;
    case kMapU64: return Element::kU64;
    case kMapS64: return Element::kS64;
    case kMapF16: return Element::kF16;
    case kMapF32: return Element::kF32;
    case kMapF64: return Element::kF64;
    case kMapBf16: return Element::kBf16;
    default: fail(Fault::kInvalid, "TMA reduction of element type %u", type);
  }
}

uint32_t box_bytes(const TensorMap& m) {
  uint32_t bytes = m.element_bytes;
  for (uint32_t i = 0; i < m.rank; i++) bytes *= m.box[i];
  return bytes;
}

// Calls visit(shared offset, global address or 0 when out of bounds, bytes) for pieces of at most 16 bytes, in box
// order.
template <class Visit>
void for_pieces(const TensorMap& m, const int32_t* coordinates, uint32_t offset, Visit visit) {
  const uint32_t row_bytes = m.box[0] * m.element_bytes;
  uint32_t rows = 1;
  for (uint32_t i = 1; i < m.rank; i++) rows *= m.box[i];
  for (uint32_t row = 0; row < rows; row++) {
    bool inside = true;
    uint64_t address = m.base;  // modulo 2^64, as hardware computes it
    for (uint32_t i = 1, rest = row; i < m.rank; rest /= m.box[i], i++) {
      int64_t c = (int64_t)coordinates[i] + rest % m.box[i];
      inside &= c >= 0 && c < m.size[i];
      address += (uint64_t)c * m.stride[i - 1];
    }
    const uint32_t per_piece = std::max(1u, 16 / m.element_bytes);
    for (uint32_t e = 0; e < m.box[0]; e += per_piece) {
      const uint32_t to = apply_swizzle(offset + row * row_bytes + e * m.element_bytes, m.swizzle);
      const int64_t first = (int64_t)coordinates[0] + e, last = first + std::min(per_piece, m.box[0] - e);
      if (inside && first >= 0 && last <= m.size[0]) {
        visit(to, address + (uint64_t)first * m.element_bytes, (uint32_t)(last - first) * m.element_bytes);
        continue;
      }
      for (int64_t c = first; c < last; c++)
        visit(to + (uint32_t)(c - first) * m.element_bytes,
              inside && c >= 0 && c < m.size[0] ? address + (uint64_t)c * m.element_bytes : 0, m.element_bytes);
    }
  }
}

uint32_t swizzle_span(Swizzle s) {
  return s == Swizzle::kNone ? 0 : s == Swizzle::k32 ? 32 : s == Swizzle::k64 ? 64 : 128;
}

// What an H200 answers with an illegal instruction, or does in a way that this model does not know, is refused.
TensorMap checked_map(uint64_t address, const int32_t* coordinates, int rank, uint32_t shared_address) {
  if (address % 64) fail(Fault::kInvalid, "tensor map at 0x%llx is not aligned", (unsigned long long)address);
  TensorMap m = decode_map((const uint8_t*)address);
  if ((int)m.rank != rank)
    fail(Fault::kInvalid, "TMA instruction of rank %d with a tensor map of rank %u", rank, m.rank);
  if (shared_address % 128)
    fail(Fault::kInvalid, "TMA: shared address 0x%x is not aligned to 128 bytes", shared_address);
  if ((int64_t)coordinates[0] * m.element_bytes % 16)
    fail(Fault::kInvalid, "TMA: the first coordinate, %d, is not a multiple of 16 bytes", coordinates[0]);
  if (m.box[0] * m.element_bytes < swizzle_span(m.swizzle))
    fail(Fault::kInvalid, "TMA: a box row of %u bytes is narrower than its swizzle of %u", m.box[0] * m.element_bytes,
         swizzle_span(m.swizzle));
  check_shared(shared_address, box_bytes(m), 128);
  return m;
}

}  // namespace

void tma_load(uint64_t tensor_map, const int32_t* coordinates, int rank, uint32_t destination, uint32_t mbarrier,
              uint32_t multicast_mask) {
  const TensorMap m = checked_map(tensor_map, coordinates, rank, destination);
  const std::vector<int32_t> c(coordinates, coordinates + rank);
  const auto all = multicast_destinations(destination, multicast_mask);
  for (uint32_t to : all) poison_shared(to, box_bytes(m));
  const Past past = race_past();
  push_async(Engine::kCopyIn, [=] {
    for (uint32_t to : all) {
      uint8_t* window = cta_of(to)->shared;
      for_pieces(m, c.data(), to & kOffsetMask, [&](uint32_t offset, uint64_t from, uint32_t bytes) {
        if (!from) {
          for (uint32_t i = 0; i < bytes; i++) window[offset + i] = !m.nan_fill ? 0 : i % 2 ? 0x7f : 0xf7;
          return;
        }
        check_global(from, bytes, "TMA load");
        memcpy(window + offset, (const void*)from, bytes);
        if (m.tf32) round_to_tf32(window + offset, bytes);
      });
      bulk_written(past, to, box_bytes(m), mbarrier);
    }
  });
}

void tensor_map_replace(uint8_t* map, MapField field, uint32_t index, uint64_t value) {
  if (index > 4) fail(Fault::kInvalid, "tensormap.replace of dimension %u", index);
  switch (field) {
    case MapField::kAddress: return store<uint64_t>(map, value);
    case MapField::kSize: return store<uint32_t>(map + 32 + 4 * index, (uint32_t)value - 1);
    case MapField::kBox: return store<uint8_t>(map + 55 + index, (uint8_t)(value - 1));
    case MapField::kStride: {  // low 32 bits of stride / 16 per dimension, then four bits each
      store<uint32_t>(map + 12 + 4 * index, (uint32_t)(value >> 4));
      uint16_t high = load<uint16_t>(map + 28), shift = 4 * index;
      return store<uint16_t>(map + 28, (uint16_t)((high & ~(15u << shift)) | ((value >> 36) & 15) << shift));
    }
  }
}

void tma_store(uint64_t tensor_map, const int32_t* coordinates, int rank, uint32_t source, Reduce reduce) {
  TensorMap m = checked_map(tensor_map, coordinates, rank, source);
  if (m.tf32) fail(Fault::kInvalid, "TMA: a store through a tf32 map is not supported");
  for (int i = 0; i < rank; i++)
    if (coordinates[i] < 0)
      fail(Fault::kInvalid, "TMA: a store or reduction at a negative coordinate, %d", coordinates[i]);
  const uint32_t per_unit = std::max(1u, 16 / m.element_bytes);
  m.size[0] = (m.size[0] + per_unit - 1) / per_unit * per_unit;  // whole 16 bytes are written, as an H200 does
  const std::vector<int32_t> c(coordinates, coordinates + rank);
  auto group = join_bulk_group();
  const Past past = race_past();
  const uint32_t ordinal = self()->bulk_issued;
  push_async(Engine::kCopyOut, [=] {
    const uint8_t* window = cta_of(source)->shared;
    bulk_reads(*self(), ordinal, past, source, box_bytes(m), "TMA store");
    for_pieces(m, c.data(), source & kOffsetMask, [&](uint32_t offset, uint64_t to, uint32_t bytes) {
      if (!to) return;
      check_global(to, bytes, "TMA store");
      if (reduce == Reduce::kNone) return (void)memcpy((void*)to, window + offset, bytes);
      for (uint32_t i = 0; i < bytes; i += m.element_bytes)
        reduce_element((uint8_t*)to + i, window + offset + i, reduce, reduce_type(m.type));
    });
    --*group;
  });
}

}  // namespace emu
