package kvevents

import "github.com/tinylib/msgp/msgp"

// Append encodes a batch as vLLM does since mid-2026: [time, events, rank], each event a map with
// its type. Hashes are integers. Extra is left out: only its hash is known.
func Append(dst []byte, batch *Batch) []byte { return appendBatch(dst, batch, (*Event).append) }

// AppendArrays encodes a batch with events as lists, as SGLang does and vLLM did before.
func AppendArrays(dst []byte, batch *Batch) []byte {
	return appendBatch(dst, batch, (*Event).appendArray)
}

func appendBatch(dst []byte, batch *Batch, event func(*Event, []byte) []byte) []byte {
	dst = msgp.AppendFloat64(msgp.AppendArrayHeader(dst, 3), batch.Time)
	dst = msgp.AppendArrayHeader(dst, uint32(len(batch.Events)))
	for i := range batch.Events {
		dst = event(&batch.Events[i], dst)
	}
	return msgp.AppendUint64(dst, uint64(batch.Rank))
}

func (ev *Event) appendArray(dst []byte) []byte {
	switch ev.Kind {
	case Cleared:
		return msgp.AppendString(msgp.AppendArrayHeader(dst, 1), "AllBlocksCleared")
	case Removed:
		dst = msgp.AppendString(msgp.AppendArrayHeader(dst, 3), "BlockRemoved")
		dst = appendNumbers(dst, ev.Hashes)
	default:
		dst = msgp.AppendString(msgp.AppendArrayHeader(dst, 7), "BlockStored")
		dst = ev.appendParent(appendNumbers(dst, ev.Hashes))
		dst = appendNumbers(dst, ev.Tokens)
		dst = msgp.AppendNil(msgp.AppendUint64(dst, uint64(ev.BlockSize)))
	}
	return msgp.AppendString(dst, mediums[ev.Tier])
}

var mediums = [Tiers]string{"GPU", "CPU", "STORAGE"}

func (ev *Event) append(dst []byte) []byte {
	switch ev.Kind {
	case Cleared:
		return msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(dst, 1), "type"), "AllBlocksCleared")
	case Removed:
		dst = msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(dst, 4), "type"), "BlockRemoved")
		dst = appendNumbers(msgp.AppendString(dst, "block_hashes"), ev.Hashes)
	default:
		dst = msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(dst, 8), "type"), "BlockStored")
		dst = appendNumbers(msgp.AppendString(dst, "block_hashes"), ev.Hashes)
		dst = ev.appendParent(msgp.AppendString(dst, "parent_block_hash"))
		dst = appendNumbers(msgp.AppendString(dst, "token_ids"), ev.Tokens)
		dst = msgp.AppendUint64(msgp.AppendString(dst, "block_size"), uint64(ev.BlockSize))
		dst = msgp.AppendString(dst, "lora_name")
		if ev.LoRA == "" {
			dst = msgp.AppendNil(dst)
		} else {
			dst = msgp.AppendString(dst, ev.LoRA)
		}
	}
	dst = msgp.AppendString(msgp.AppendString(dst, "medium"), mediums[ev.Tier])
	return msgp.AppendUint64(msgp.AppendString(dst, "group_idx"), uint64(ev.Group))
}

func (ev *Event) appendParent(dst []byte) []byte {
	if !ev.HasParent {
		return msgp.AppendNil(dst)
	}
	return msgp.AppendUint64(dst, ev.Parent)
}

func appendNumbers[T uint32 | uint64](dst []byte, list []T) []byte {
	dst = msgp.AppendArrayHeader(dst, uint32(len(list)))
	for _, n := range list {
		dst = msgp.AppendUint64(dst, uint64(n))
	}
	return dst
}
