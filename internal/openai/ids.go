package openai

// A worker tells its router a stream's token ids in a line of text: four characters each, of six
// bits, from '0' to 'o', the highest first. That is as short as they are kept, without a line's end,
// and read without arithmetic.
const (
	// IDBytes is how many bytes an id has.
	IDBytes = 4
	// MaxSentID is the highest token id that can be told so.
	MaxSentID = 1<<(6*IDBytes) - 1
)

// AppendIDs appends ids, none of them above MaxSentID.
func AppendIDs(dst []byte, ids []int32) []byte {
	for _, id := range ids {
		dst = append(dst, '0'+byte(id>>18&63), '0'+byte(id>>12&63), '0'+byte(id>>6&63), '0'+byte(id&63))
	}
	return dst
}

// CountIDs returns how many ids a text has; -1 if it is none of ids.
func CountIDs(text []byte) int {
	for _, c := range text {
		if c-'0' > 63 {
			return -1
		}
	}
	if len(text)%IDBytes != 0 {
		return -1
	}
	return len(text) / IDBytes
}

// IDAt returns the i-th id of a text of ids.
func IDAt(text []byte, i int) (id int32) {
	for _, c := range text[IDBytes*i:][:IDBytes] {
		id = id<<6 | int32(c-'0')
	}
	return id
}
