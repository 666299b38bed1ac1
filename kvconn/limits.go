package kvconn

const maxString = 4096 // bytes of any one string on the wire
